"""Evidence for the other side: one file with a result and all it rests on, and the check that it gives the same again.

Reads finished results, sends nothing. `archive.py` reads and writes the file, `remake.py` makes every derived file
again from what was kept, `differences.py` compares, `verify.py` says what came out.
"""
