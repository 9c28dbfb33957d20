"""Render reports as text, Markdown, HTML, SVG and JUnit.

This package knows no feature and computes no metric: it turns values into strings.
"""
