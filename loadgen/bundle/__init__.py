"""Pack a result with its raw data into one file, and verify it (`bundle`, `verify`).

`archive.py` reads and writes the file. To verify it, `remake.py` regenerates every derived file
from the raw data and `differences.py` compares them.
"""
