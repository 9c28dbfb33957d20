"""The files of a run: rows, `run.json`, the spool that workers append to, `capacity.json`, copies to object stores.

Computes no figure. `record.py` and `manifest.py` are pure; the rest reads and writes files.
"""
