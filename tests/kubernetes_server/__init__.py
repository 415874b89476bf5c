"""A small Kubernetes 1.32 control plane for tests: API server, controllers, scheduler, kubelets that run processes.

    PYTHONPATH=tests python -m kubernetes_server --nodes 2 --gpus 4 --kubeconfig /tmp/kubeconfig &
    KUBECONFIG=/tmp/kubeconfig kubectl get nodes

`process.running` starts it for a test, and `process.faults_of(kubeconfig)` makes faults, which are the methods of
`faults/control.py`. `kubernetes_client.py` beside this folder is a client for tests.

| folder or module | what is in it |
|---|---|
| `store`, `operations`, `deletion`, `admission`, `patches`, `ownership`, `selectors`, `schema` | what a request does |
| `kinds` | defaults and validation |
| `api` | HTTP: users and roles, discovery, lists, watches, tables for kubectl, logs |
| `controllers` | jobs, endpoints, namespaces, lost nodes, garbage |
| `scheduling` | the scheduler, with preemption |
| `kubelet`, `runtime` | pods on a node; the process that starts containers |
| `trainer` | Kubeflow Trainer and JobSet, with `--trainer VERSION` |
| `faults` | what tests do to it |

What differs from a real cluster:

- Every image is this machine: its root, with volumes mounted over it, and what a pod writes outside its volumes is
  written on this machine. `--hidden FOLDER` hides folders from pods, and `--bare IMAGE` those with programs from the
  containers of an image. `python3` is the one that runs the tests.
- A container has its own processes, mounts and host name, but not its own network: pods have addresses of this machine
  (127.x.y.z), and what one binds to 0.0.0.0 no other can bind. Names of headless services are in /etc/hosts, where they
  appear and disappear while a pod runs, but programs that ask a DNS server do not find them. Nothing serves ClusterIPs.
- Without root, memory limits, and probes and hooks that run commands, have no effect. CPU limits never have any.
- The waits of controllers are shorter, as `settings.Timing` says, unless `--real-timing` is given.
- There are no protobuf bodies, so that `kubectl create job` and `kubectl create namespace` fail; `kubectl apply`, and
  `kubectl create -f`, work. There is no `exec`, `attach`, `port-forward` or `kubectl explain`.
- Of Jobs, `backoffLimitPerIndex`, `maxFailedIndexes` and `successPolicy` are ignored. Of pods, liveness and startup
  probes, sidecars, preferred affinities, pod affinities, topology spread and /dev/termination-log are. There are no
  quotas, limit ranges, disruption budgets, webhooks of others or pod security. Of custom resources, only the names of
  fields are checked, where a CustomResourceDefinition has them.
- Components do not suffer from faults of the API, as they do not use HTTP.
"""
