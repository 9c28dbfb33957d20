"""Merge the independent parts of a run into one run (`loadgen merge`).

`loadgen run --shard I/N` sends a part. Parts of different runs are refused.
"""
