"""How does a load go out from many machines at once? Workers on the nodes of a Ray cluster: `--ray`.

A backend, reached by its row in `loadgen.backends`. `clock_sync.py` is pure; `ray.py` alone imports Ray.
"""
