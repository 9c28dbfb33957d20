"""How does a load go out from many machines at once? Workers on the nodes of a Ray cluster: `--ray`.

A backend, reached by its row in `loadgen.backends`. `crew.py` leads the workers, `ray.py` places them, and
`ray_process.py` alone imports Ray; `clock_sync.py` is pure.
"""
