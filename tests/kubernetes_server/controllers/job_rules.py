"""What a Job makes of its pods: pure functions of the job and the pods."""

from __future__ import annotations

from kubernetes_server.kinds.jobs import INDEX, TRACKING
from kubernetes_server.objects import Object, annotations_of, is_deleting


def is_finished(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def is_active(pod: Object) -> bool:
    return not is_finished(pod) and not is_deleting(pod)


def is_terminating(pod: Object) -> bool:
    return not is_finished(pod) and is_deleting(pod)


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def is_tracked(pod: Object) -> bool:
    return TRACKING in (pod["metadata"].get("finalizers") or ())


def waits_for_ends(job: Object) -> bool:
    """Whether pods are replaced only once they have ended, not as soon as they are being deleted."""
    return bool(job["spec"]["podReplacementPolicy"] == "Failed")


def has_failed(job: Object, pod: Object) -> bool:
    if pod["status"].get("phase") == "Failed":
        return True
    if waits_for_ends(job):
        return False
    # A pod that is being deleted may never get to say how it ended.
    return is_deleting(pod) and pod["status"].get("phase") != "Succeeded"


def index_of(pod: Object) -> int:
    return int(annotations_of(pod).get(INDEX, -1))


def is_indexed(job: Object) -> bool:
    return bool(job["spec"]["completionMode"] == "Indexed")


def policy_verdict(job: Object, pod: Object) -> tuple[str, str]:
    """The action that the failure policy of a job has for a failed pod (Count if none), and why."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules") or []
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    if pod["status"].get("phase") != "Failed":
        rules = []
    for i, rule in enumerate(rules):
        action = rule["action"]
        if codes := rule.get("onExitCodes"):
            for status in _container_statuses(pod):
                code = (status["state"].get("terminated") or {}).get("exitCode", 0)
                if code == 0 or codes.get("containerName") not in (None, "", status["name"]):
                    continue
                if (code in codes["values"]) == (codes["operator"] == "In"):
                    return action, (
                        f"Container {status['name']} for pod {namespace}/{name} failed with exit code {code} "
                        f"matching {action} rule at index {i}"
                    )
        for pattern in rule.get("onPodConditions") or ():
            for condition in pod["status"].get("conditions") or ():
                if (condition["type"], condition["status"]) == (pattern["type"], pattern.get("status", "True")):
                    return action, (
                        f"Pod {namespace}/{name} has condition {pattern['type']} matching {action} rule at index {i}"
                    )
    return "Count", ""


def restarts(pods: list[Object]) -> int:
    """How often containers were restarted in place."""
    return sum(
        status["restartCount"]
        for pod in pods
        for status in _container_statuses(pod)
        if pod["status"].get("phase") in ("Running", "Pending")
    )


def is_past_backoff_limit_on_failure(job: Object, pods: list[Object]) -> bool:
    if job["spec"]["template"]["spec"]["restartPolicy"] != "OnFailure":
        return False
    count, limit = restarts(pods), job["spec"]["backoffLimit"]
    return count > 0 if limit == 0 else count >= limit


def parse_indexes(text: str) -> set[int]:
    """`1,3-5` as numbers."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def format_indexes(indexes: set[int]) -> str:
    parts: list[str] = []
    ordered = sorted(indexes)
    start = 0
    for i in range(len(ordered)):
        if i + 1 == len(ordered) or ordered[i + 1] != ordered[i] + 1:
            first, last = ordered[start], ordered[i]
            # As the real one: two in a row are a range as well.
            parts.append(str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first},{last}")
            start = i + 1
    return ",".join(parts)


def _container_statuses(pod: Object) -> list[Object]:
    status = pod["status"]
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
