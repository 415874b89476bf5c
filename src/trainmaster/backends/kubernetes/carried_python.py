"""The worker's Python in pods whose image may have none: brought by an init container from the cluster's image. Pure.

Jobs that run Python themselves do so with that of their image, and so does their worker.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.engine import EngineLaunch
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.overlays import WORKER
from trainmaster.protocol.environment import CA

FOLDER = "/trainmaster"
_NAME = "python"
_COPY = "TRAINMASTER_PYTHON_COPY"
START = (f"{FOLDER}/ld.so", "--library-path", f"{FOLDER}/lib", f"{FOLDER}/bin/python3", "-I")
_COMMAND = [*START, "-c", f"import os; exec(os.environ[{worker_start.SOURCE!r}])"]
_HELD_FOR_ALL = ("cpu", "memory", "ephemeral-storage")
"""What the init container asks for, too: a pod is given as much as the largest of its containers needs, and quotas want
every container to say it."""


def carries_python(launch: EngineLaunch, options: KubernetesOptions) -> bool:
    wanted = launch.request.launch
    if not options.image or wanted.image in (None, options.image) or wanted.kubernetes.runtime is not None:
        return False
    return not any(step.python for step in wanted.steps)


def with_python(template: dict[str, Any], options: KubernetesOptions) -> dict[str, Any]:
    """The template of pods whose worker starts with the Python of the cluster's image."""
    spec = template["spec"]
    (own,) = (each for each in spec["containers"] if each["name"] == WORKER)
    mount = {"name": _NAME, "mountPath": FOLDER}
    variables = {worker_start.INTERPRETER: json.dumps(START), CA: f"{FOLDER}/ca.pem"}
    started = {
        **own,
        "command": _COMMAND,
        "env": [*own["env"], *({"name": name, "value": value} for name, value in variables.items())],
        "volumeMounts": [*own["volumeMounts"], {**mount, "readOnly": True}],
    }
    python = next(each["value"] for each in own["env"] if each["name"] == worker_start.PYTHON)
    copies = {
        "name": _NAME,
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy.value,
        "command": list(worker_start.command(_COPY, FOLDER)),
        "env": [{"name": worker_start.PYTHON, "value": python}, {"name": _COPY, "value": _source()}],
        "volumeMounts": [mount],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"securityContext": own["securityContext"]} if "securityContext" in own else {}),
    }
    if amounts := {name: some for name, some in _requests(own).items() if name in _HELD_FOR_ALL}:
        copies["resources"] = {"requests": amounts, "limits": amounts}
    changed = {
        "initContainers": [copies, *spec.get("initContainers", ())],
        "containers": [started if each is own else each for each in spec["containers"]],
        "volumes": [*spec["volumes"], {"name": _NAME, "emptyDir": {}}],
    }
    return {**template, "spec": {**spec, **changed}}


def _requests(container: dict[str, Any]) -> dict[str, str]:
    return dict((container.get("resources") or {}).get("requests") or {})


@functools.cache
def _source() -> str:
    return resources.files("trainmaster.backends.kubernetes").joinpath("python_copy.py").read_text(encoding="utf-8")
