"""The status of a pod, from the states of its containers."""

from __future__ import annotations

from kubernetes_server.kubelet.containers import ContainerRun
from kubernetes_server.objects import Object, set_condition, timestamp


def phase_of(pod: Object, initial: list[ContainerRun], main: list[ContainerRun], *, terminal: bool) -> str:
    """`terminal`: whether no container of the pod runs any more, or will again."""
    policy = pod["spec"]["restartPolicy"]
    if terminal:
        return "Succeeded" if main and all(run.exit_code == 0 for run in main) else "Failed"
    if any(run.exit_code != 0 for run in initial):
        failed = any(run.exit_code not in (None, 0) for run in initial)
        return "Failed" if failed and policy == "Never" else "Pending"
    if any("waiting" in run.state and not run.last_state for run in main):
        return "Pending"
    if any(run.exit_code is None for run in main) or policy == "Always":
        return "Running"
    if all(run.exit_code == 0 for run in main):
        return "Succeeded"
    return "Failed" if policy == "Never" else "Running"


def write_status(
    pod: Object, initial: list[ContainerRun], main: list[ContainerRun], *, phase: str, address: str, host: str,
    reason: str = "", message: str = "",
) -> None:  # fmt: skip
    """Write the status of a pod, in place."""
    status = pod["status"]
    status["phase"] = phase
    for name, text in (("reason", reason), ("message", message)):
        if text:
            status[name] = text
    status["hostIP"] = host
    status["hostIPs"] = [{"ip": host}]
    if address:
        status["podIP"] = address
        status["podIPs"] = [{"ip": address}]
    status.setdefault("startTime", timestamp())
    ended = phase in ("Succeeded", "Failed")
    conditions = status.setdefault("conditions", [])
    set_condition(conditions, "PodReadyToStartContainers", "True" if address and not ended else "False")
    incomplete = [run.name for run in initial if run.exit_code != 0]
    if incomplete and phase != "Succeeded":
        text = f"containers with incomplete status: [{' '.join(incomplete)}]"
        set_condition(conditions, "Initialized", "False", reason="ContainersNotInitialized", message=text)
    elif phase == "Succeeded":
        set_condition(conditions, "Initialized", "True", reason="PodCompleted")
    else:
        set_condition(conditions, "Initialized", "True")
    unready = [run.name for run in main if not run.ready]
    for kind in ("Ready", "ContainersReady"):
        if phase in ("Succeeded", "Failed"):
            set_condition(conditions, kind, "False", reason="PodCompleted" if phase == "Succeeded" else "PodFailed")
        elif unready:
            text = f"containers with unready status: [{' '.join(unready)}]"
            set_condition(conditions, kind, "False", reason="ContainersNotReady", message=text)
        else:
            set_condition(conditions, kind, "True")
    status["containerStatuses"] = [run.status() for run in main]
    if initial:
        status["initContainerStatuses"] = [run.status() for run in initial]
