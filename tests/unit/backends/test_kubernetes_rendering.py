"""The objects that Kubernetes is sent for an attempt."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from kubernetes_launches import kubernetes_launch
from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.engine import EngineLaunch, EngineRefusedError
from trainmaster.backends.kubernetes import carried_python, manifests, python_copy
from trainmaster.backends.kubernetes.gpus import GpuChoice
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.protocol.launch import ContainerRequest, KubernetesRequest, LaunchStep

GOLDEN = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: tm-k3f9-job-1-1
  namespace: team
  labels:
    app.kubernetes.io/managed-by: trainmaster
    trainmaster.io/instance: k3f9
    trainmaster.io/attempt: tm-k3f9-job-1-1
    trainmaster.io/account: team-A
  annotations:
    trainmaster.io/attempt-id: job-1.1
    trainmaster.io/account: team A
    trainmaster.io/job-name: it's "a $(job)"
spec:
  suspend: true
  completionMode: Indexed
  completions: 2
  parallelism: 2
  backoffLimit: 0
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
    - action: FailJob
      onPodConditions:
      - type: DisruptionTarget
        status: 'True'
  activeDeadlineSeconds: 4220
  template:
    metadata:
      labels:
        app.kubernetes.io/managed-by: trainmaster
        trainmaster.io/instance: k3f9
        trainmaster.io/attempt: tm-k3f9-job-1-1
        trainmaster.io/account: team-A
      annotations:
        trainmaster.io/attempt-id: job-1.1
        trainmaster.io/account: team A
        trainmaster.io/job-name: it's "a $(job)"
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 30
      enableServiceLinks: false
      automountServiceAccountToken: true
      tolerations:
      - key: nvidia.com/gpu
        operator: Exists
      - key: node.kubernetes.io/not-ready
        operator: Exists
        effect: NoExecute
        tolerationSeconds: 120
      - key: node.kubernetes.io/unreachable
        operator: Exists
        effect: NoExecute
        tolerationSeconds: 120
      subdomain: tm-k3f9-job-1-1
      serviceAccountName: trainer
      imagePullSecrets:
      - name: registry
      priorityClassName: high
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions:
              - key: pool
                operator: In
                values:
                - training
              - key: disk
                operator: In
                values:
                - nvme
              - key: nvidia.com/gpu.product
                operator: In
                values:
                - NVIDIA-H100-80GB-HBM3
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 10
            preference:
              matchExpressions:
              - key: zone
                operator: In
                values:
                - a
      containers:
      - name: worker
        image: registry.test/python:3.12
        imagePullPolicy: IfNotPresent
        command:
        - sh
        - -c
        - exec worker $$(date)
        env:
        - name: TRAINMASTER_WORKER
          value: '{"a": 1}'
        - name: TRAINMASTER_ECHO
          value: '1'
        - name: TRAINMASTER_WORKER_TOKEN
          valueFrom:
            secretKeyRef:
              name: tm-k3f9-job-1-1
              key: TRAINMASTER_WORKER_TOKEN
        volumeMounts:
        - name: shm
          mountPath: /dev/shm
        resources:
          requests:
            cpu: '8'
            memory: 65536Mi
            ephemeral-storage: 1024Mi
            nvidia.com/gpu: '4'
          limits:
            cpu: '8'
            memory: 65536Mi
            ephemeral-storage: 1024Mi
            nvidia.com/gpu: '4'
      volumes:
      - name: shm
        emptyDir:
          medium: Memory
          sizeLimit: 4096Mi
---
apiVersion: v1
kind: Secret
metadata:
  name: tm-k3f9-job-1-1
  namespace: team
  labels:
    app.kubernetes.io/managed-by: trainmaster
    trainmaster.io/instance: k3f9
    trainmaster.io/attempt: tm-k3f9-job-1-1
    trainmaster.io/account: team-A
  annotations:
    trainmaster.io/attempt-id: job-1.1
    trainmaster.io/account: team A
    trainmaster.io/job-name: it's "a $(job)"
  ownerReferences:
  - apiVersion: batch/v1
    kind: Job
    name: tm-k3f9-job-1-1
    uid: (of the Job)
    controller: true
type: Opaque
stringData:
  TRAINMASTER_WORKER_TOKEN: (hidden)
---
apiVersion: v1
kind: Service
metadata:
  name: tm-k3f9-job-1-1
  namespace: team
  labels:
    app.kubernetes.io/managed-by: trainmaster
    trainmaster.io/instance: k3f9
    trainmaster.io/attempt: tm-k3f9-job-1-1
    trainmaster.io/account: team-A
  annotations:
    trainmaster.io/attempt-id: job-1.1
    trainmaster.io/account: team A
    trainmaster.io/job-name: it's "a $(job)"
  ownerReferences:
  - apiVersion: batch/v1
    kind: Job
    name: tm-k3f9-job-1-1
    uid: (of the Job)
    controller: true
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    trainmaster.io/attempt: tm-k3f9-job-1-1
---
# Once all of them are there, the Job is patched:
#   metadata:
#     annotations:
#       trainmaster.io/started: 'true'
#   spec:
#     suspend: false
"""
NO_GPUS = GpuChoice(values=())


def options(**values: Any) -> KubernetesOptions:
    return KubernetesOptions(image="registry.test/python:3.12", **values)


def job(launch: EngineLaunch, given: KubernetesOptions | None = None) -> dict[str, Any]:
    return manifests.job(launch, given or options(), NO_GPUS)


def pod(launch: EngineLaunch, given: KubernetesOptions | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = job(launch, given)["spec"]["template"]["spec"]
    return spec


def worker(launch: EngineLaunch, given: KubernetesOptions | None = None) -> dict[str, Any]:
    (container,) = pod(launch, given)["containers"]
    return dict(container)


def asking(launch: EngineLaunch, **changes: Any) -> EngineLaunch:
    """The same for a job that asks Kubernetes for something."""
    asked = replace(launch.request.launch, kubernetes=KubernetesRequest(**changes))
    return replace(launch, request=replace(launch.request, launch=asked))


def test_document_shows_all_objects_and_no_secret() -> None:
    given = options(
        service_account="trainer",
        image_pull_secrets="registry",
        priority_classes="0=low,8=high",
        node_selector="pool=training",
        tolerations="[{key: nvidia.com/gpu, operator: Exists}]",
    )
    launch = kubernetes_launch(
        "exec worker $(date)",
        job_id="job-1",
        nodes=2,
        max_runtime_s=3600,
        container=ContainerRequest(shm_mb=4096),
        environment={"TRAINMASTER_WORKER": '{"a": 1}'},
        secrets={"TRAINMASTER_WORKER_TOKEN": "secret-token"},
        account="team A",
        job_name='it\'s "a $(job)"',
        priority=9,
        gpus=4,
        cpu_cores=8,
        memory_mb=65_536,
        storage_mb=1024,
        capabilities=("disk=nvme",),
        affinity=("zone=a",),
    )
    made = manifests.job(launch, given, GpuChoice(values=("NVIDIA-H100-80GB-HBM3",)))
    assert manifests.document(launch, made, manifests.started(given), namespace="team") == GOLDEN
    assert yaml.safe_load_all(GOLDEN)


def test_job_of_a_queue_of_kueue_is_let_go_by_kueue() -> None:
    given = options(kueue_queue="training")
    assert job(kubernetes_launch(), given)["spec"]["suspend"]
    assert manifests.started(given)["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    assert "spec" not in manifests.started(given)


def test_labels_and_annotations_of_a_job_are_beside_our_own() -> None:
    launch = asking(kubernetes_launch(), labels={"team": "a"}, annotations={"note": "b c"})
    head = job(launch)["metadata"]
    assert (head["labels"]["team"], head["annotations"]["note"]) == ("a", "b c")
    assert head["labels"].items() >= manifests.labels(launch).items()
    assert "team" not in job(launch)["spec"]["template"]["metadata"]["labels"]


def test_runtime_patches_change_the_pods_of_the_job_and_not_what_trainmaster_relies_on() -> None:
    patch = {
        "metadata": {"labels": {"team": "a", manifests.ATTEMPT: "another"}},
        "spec": {"hostNetwork": True, "containers": [{"name": "node", "env": [{"name": "A", "value": "b"}]}]},
    }
    template = job(asking(kubernetes_launch(), pod_patches=(patch,)))["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][manifests.ATTEMPT] == "tm-k3f9-job-wk96lltjcfl9-1"
    (container,) = template["spec"]["containers"]
    assert template["spec"]["hostNetwork"] is True
    assert {"name": "A", "value": "b"} in container["env"]
    with pytest.raises(EngineRefusedError, match="command of worker: Trainmaster sets it"):
        job(asking(kubernetes_launch(), pod_patches=({"spec": {"containers": [{"name": "node", "command": ["x"]}]}},)))


def test_template_of_the_operator_is_merged_by_names() -> None:
    overlay = """
    spec:
      runtimeClassName: nvidia
      containers:
      - name: worker
        securityContext: {runAsUser: 1000}
        volumeMounts: [{name: data, mountPath: /data}]
      - name: side
        image: side
      volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
    """
    spec = pod(kubernetes_launch(), options(pod_template=overlay))
    assert spec["runtimeClassName"] == "nvidia"
    assert [each["name"] for each in spec["containers"]] == ["worker", "side"]
    assert [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]] == ["/dev/shm", "/data"]
    assert [each["name"] for each in spec["volumes"]] == ["shm", "data"]


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ("kind: Pod", "it has `metadata` and `spec`"),
        ("spec: {restartPolicy: Always}", "restartPolicy: Trainmaster sets it"),
        ("spec: {containers: [{image: a}]}", "entries have `name`"),
        ("spec: {containers: [{name: worker, $patch: delete}]}", "worker cannot be removed"),
    ],
)
def test_template_that_cannot_be_merged_is_refused(overlay: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        options(pod_template=overlay)


def test_capability_that_cannot_be_a_label_is_refused_and_a_wish_is_left_out() -> None:
    with pytest.raises(EngineRefusedError, match="'a b' cannot be a label"):
        job(kubernetes_launch(capabilities=("a b",)))
    assert "affinity" not in pod(kubernetes_launch(affinity=("a b",)))


def test_pods_without_gpus_see_none() -> None:
    hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    assert hidden in worker(kubernetes_launch())["env"]
    assert hidden not in worker(kubernetes_launch(gpus=1))["env"]
    assert worker(kubernetes_launch(gpus=1), options(gpu_resource="nvidia.com/mig-3g.20gb"))["resources"]["limits"] == {
        "nvidia.com/mig-3g.20gb": "1"
    }


START = {worker_start.PYTHON: "/usr/bin/python3.12", worker_start.SOURCE: "print()"}


def test_command_in_an_image_of_its_own_gets_the_python_of_the_clusters_image() -> None:
    overlay = "spec: {containers: [{name: worker, securityContext: {runAsUser: 1000}}], initContainers: [{name: x}]}"
    launch = kubernetes_launch(image="bare", environment=START, memory_mb=64, gpus=1)
    spec = pod(launch, options(pod_template=overlay))
    python, other = spec["initContainers"]
    assert other["name"] == "x"
    assert (python["image"], python["volumeMounts"]) == (
        "registry.test/python:3.12",
        [{"name": "python", "mountPath": "/trainmaster"}],
    )
    assert python["securityContext"] == {"runAsUser": 1000}
    assert python["resources"]["limits"] == {"memory": "64Mi"}
    assert python["command"][-2:] == ["sh", "/trainmaster"]
    values = {each["name"]: each["value"] for each in python["env"]}
    assert values[worker_start.PYTHON] == "/usr/bin/python3.12"
    assert Path(python_copy.__file__).read_text() in values.values()
    (container,) = spec["containers"]
    assert container["image"] == "bare"
    assert container["command"][0] == "/trainmaster/ld.so"
    assert {"name": "python", "emptyDir": {}} in spec["volumes"]


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(kubernetes_launch(environment=START), id="no image"),
        pytest.param(kubernetes_launch(image="registry.test/python:3.12", environment=START), id="the same image"),
        pytest.param(asking(kubernetes_launch(image="bare", environment=START), runtime="torch"), id="runtime"),
    ],
)
def test_other_jobs_start_with_the_python_of_their_image(launch: EngineLaunch) -> None:
    assert "initContainers" not in pod(launch)


def test_job_that_runs_python_has_the_python_of_its_image() -> None:
    launch = kubernetes_launch(image="bare", environment=START)
    script = replace(launch.request.launch, steps=(LaunchStep(name="main", argv=("a.py",), python=True),))
    assert "initContainers" not in pod(replace(launch, request=replace(launch.request, launch=script)))
    assert "initContainers" not in pod(launch, KubernetesOptions())


RUNS = """
import ctypes, hashlib, json, os, socket, ssl, sys, urllib.request, zipfile
ssl.create_default_context(cafile="/trainmaster/ca.pem" if os.path.exists("/trainmaster/ca.pem") else None)
socket.getaddrinfo("127.0.0.1", 80)
print(json.dumps({"executable": sys.executable, "version": list(sys.version_info[:2]), "root": os.listdir("/")}))
"""


def test_copied_python_runs_where_there_is_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "trainmaster"
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", Path(python_copy.__file__).read_text(), folder], check=True)
    alone = ["unshare", "--user", "--map-root-user", "chroot", str(tmp_path / "root")]
    done = subprocess.run(
        [*alone, *carried_python.START, "-c", RUNS],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "executable": "/trainmaster/bin/python3",
        "version": list(sys.version_info[:2]),
        "root": ["trainmaster"],
    }
