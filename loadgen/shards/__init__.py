"""How do many machines send one load without Ray? Independent parts, merged: `loadgen merge`.

`loadgen run --shard I/N` sends a part. `parts.py` reads the folders of the parts and refuses those
of different runs; `merge.py` writes the folder of one ordinary run, with the records of
`records.py` and the header of `header.py`. Sends nothing.
"""
