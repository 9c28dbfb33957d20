"""The only renderer: text for terminals, Markdown, JSON, JUnit, HTML pages, charts, and the live dashboard.

Functions take values and return strings. The rooms below compute the figures; this one does not compute any others.
`dashboard.py` runs as a separate process.
"""
