"""How does a load go out from many machines at once? Workers on the nodes of a Ray cluster, or at agents: `--ray`.

A backend, reached by its row in `loadgen.backends`. `crew.py` leads the workers, `ray.py` (which alone imports Ray) or
`listeners.py` places them; `clock_sync.py` is pure.
"""
