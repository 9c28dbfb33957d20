"""Comparison of results: first whether the work was the same, then each difference with its interval.

It reads finished results, runs no load and renders nothing. It does not import the other judgements.
"""
