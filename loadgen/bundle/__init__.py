"""Pack a result with its raw data into one file, and verify it (`bundle`, `verify`).

`archive.py` reads and writes the file. To verify it, `derived_files.py` regenerates every file
that follows from the raw data, and `differences.py` compares them with the stored ones.
"""
