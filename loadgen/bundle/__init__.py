"""Can the other side check it? One file with a result and all it rests on: `loadgen bundle` and `loadgen verify`.

Reads finished results, sends nothing. `archive.py` reads and writes the file, `remake.py` makes every derived file
again from what was kept, `differences.py` compares, `verify.py` says what came out.
"""
