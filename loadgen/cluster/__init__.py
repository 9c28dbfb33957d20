"""Send one load from the nodes of a Ray cluster (`--ray`).

`worker_group.py` controls the workers, `ray_nodes.py` finds nodes and places agents, and
`node_agent.py` runs a worker on a node. Only `ray_process.py` imports Ray, in a child process that
`ray_client.py` starts.
"""
