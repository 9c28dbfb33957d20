"""How does a load go out from the pods of a Kubernetes cluster? An indexed Job, followed and fetched: `loadgen kube`.

`manifests.py` and `state.py` are pure; `kubectl.py` alone speaks to the API, through the user's own kubectl. `pod.py`
runs in the pods: pod 0 leads, and all are agents that listen (`cluster/listening.py`).
"""
