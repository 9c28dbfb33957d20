"""Values as text, Markdown, HTML, SVG and JUnit: tables, sections, pages.

Knows no wing and computes no figure: values in, strings out.
"""
