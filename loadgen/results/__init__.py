"""The files of a run: rows, the manifest (`run.json`), the spool that workers append to, capacity, object stores.

Computes no figure. `record.py`, `manifest.py` and `slot_ranges.py` are pure; the rest reads and writes files.
"""
