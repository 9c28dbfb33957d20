"""The files of a run: request records, run.json and the record log of each worker.

`record.py` and `manifest.py` define the formats. The other modules read and write files.
"""
