"""The only renderer: text, Markdown, CSV, JUnit, HTML pages, charts, the live dashboard.

Values in, strings out: no figure is computed here that a room below could give. Only `dashboard.py` and `progress.py`
wait; the dashboard is a process of its own that reads a growing folder.
"""
