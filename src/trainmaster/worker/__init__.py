"""The worker: supervises one node of one attempt. Standard library and `trainmaster.protocol` only.

`supervise` is a worker from its claim to its exit; `forkserver` is the warm parent that forks workers;
`courier` connects a worker to a server whose files it cannot reach.
"""
