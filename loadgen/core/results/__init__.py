"""The files of a run: rows, `run.json`, the spool that workers append to, `capacity.json`, copies to object stores.

Computes no figure. `record.py`, `manifest.py` and `slot_ranges.py` are pure; the rest reads and writes files.
"""
