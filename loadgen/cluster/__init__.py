"""How do many machines send one load? Workers on the nodes of a Ray cluster: `--ray`.

A backend, reached by its row in `loadgen.backends`. `worker_group.py` leads the workers,
`ray_nodes.py` finds nodes and places agents, `node_agent.py` runs a worker on a node. Only
`ray_process.py` imports Ray, in a child process that `ray_client.py` calls. `clock_sync.py` and
`placement.py` are pure.
"""
