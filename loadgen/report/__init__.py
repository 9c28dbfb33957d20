"""The only renderer: text for terminals, Markdown, JSON for people's tools, HTML pages, charts, the live dashboard.

Values in, strings out. Computes no figure that is not made by the rooms below; `dashboard.py` is a process of its own.
"""
