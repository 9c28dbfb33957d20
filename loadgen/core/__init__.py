"""What one run needs: the workload, its timetable, its requests, the driver, the records and their figures.

Imports no wing, not `render/` and not the shell; what the wings add stands in the tables beside this package.
"""
