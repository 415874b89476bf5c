"""A small Kubernetes control plane for tests: an API server, controllers, a scheduler, and kubelets that run processes.

`process.running` starts it for a test; `python -m kubernetes_server --help` for a person with kubectl.
"""
