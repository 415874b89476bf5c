"""Jobs: defaults and validation."""

from __future__ import annotations

from kubernetes_server.kinds.names import LABEL_MESSAGE, is_label, label_causes
from kubernetes_server.kinds.pods import default_pod_spec, pod_spec_causes
from kubernetes_server.objects import Object, clone, has_condition
from kubernetes_server.statuses import Cause, invalid_value, required, unsupported

UID_LABEL = "batch.kubernetes.io/controller-uid"
NAME_LABEL = "batch.kubernetes.io/job-name"
INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"


def default_job(job: Object) -> None:
    spec = job.setdefault("spec", {})
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = spec["parallelism"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("backoffLimit", 2**31 - 1 if "backoffLimitPerIndex" in spec else 6)
    spec.setdefault("suspend", False)
    spec.setdefault("manualSelector", False)
    spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    for rule in (spec.get("podFailurePolicy") or {}).get("rules", ()):
        for pattern in rule.get("onPodConditions", ()):
            pattern.setdefault("status", "True")
    template = spec.setdefault("template", {})
    default_pod_spec(template.setdefault("spec", {}))


def own_pods(job: Object) -> None:
    """Labels and selector by which a job finds its pods; the labels need the job's uid."""
    metadata, spec = job["metadata"], job["spec"]
    if spec["manualSelector"]:
        return
    labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    labels |= {"controller-uid": metadata["uid"], "job-name": metadata["name"]}
    labels |= {UID_LABEL: metadata["uid"], NAME_LABEL: metadata["name"]}
    spec["selector"] = {"matchLabels": {UID_LABEL: metadata["uid"]}}


def job_causes(job: Object) -> list[Cause]:
    spec = job["spec"]
    counts = ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished")
    causes = [
        invalid_value(f"spec.{name}", spec[name], "must be greater than or equal to 0")
        for name in counts
        if (spec.get(name) or 0) < 0
    ]
    if spec["completionMode"] not in ("NonIndexed", "Indexed"):
        causes.append(unsupported("spec.completionMode", spec["completionMode"], ("Indexed", "NonIndexed")))
    if spec["completionMode"] == "Indexed":
        if spec.get("completions") is None:
            causes.append(required("spec.completions", "when completion mode is Indexed"))
        else:
            last = f"{job['metadata'].get('name', '')}-{max(spec['completions'] - 1, 0)}"
            if not is_label(last):
                text = LABEL_MESSAGE if len(last) <= 63 else "must be no more than 63 characters"
                causes.append(
                    invalid_value("metadata.name", last, f"will not able to create pod with invalid DNS label: {text}")
                )
    replacement = spec["podReplacementPolicy"]
    if spec.get("podFailurePolicy"):
        causes += _failure_policy_causes(spec)
        if replacement != "Failed":
            causes.append(unsupported("spec.podReplacementPolicy", replacement, ("Failed",)))
    elif replacement not in ("Failed", "TerminatingOrFailed"):
        causes.append(unsupported("spec.podReplacementPolicy", replacement, ("Failed", "TerminatingOrFailed")))
    template = spec["template"]
    causes += label_causes((template.get("metadata") or {}).get("labels") or {}, "spec.template.labels")
    return causes + pod_spec_causes(template["spec"], "spec.template.spec", ("OnFailure", "Never"))


def job_update_causes(new: Object, old: Object) -> list[Cause]:
    spec, before = new["spec"], old["spec"]
    causes = []
    elastic = before["completionMode"] == "Indexed" and spec.get("completions") == spec.get("parallelism")
    if spec.get("completions") != before.get("completions") and not elastic:
        causes.append(invalid_value("spec.completions", spec.get("completions"), "field is immutable"))
    causes += [
        invalid_value(f"spec.{name}", spec.get(name), "field is immutable")
        for name in ("selector", "completionMode", "podFailurePolicy", "backoffLimitPerIndex", "managedBy")
        if spec.get(name) != before.get(name)
    ]
    if _fixed_template(spec, old) != _fixed_template(before, old):
        causes.append(invalid_value("spec.template", "core.PodTemplateSpec{...}", "field is immutable"))
    return causes


def _fixed_template(spec: Object, old: Object) -> Object:
    """The part of a template that may not change: all, unless the job is suspended and has never started."""
    template: Object = clone(spec["template"])
    started = "startTime" in (old.get("status") or {})
    if old["spec"]["suspend"] and (not started or has_condition(old, "Suspended")):
        for name in ("nodeSelector", "affinity", "tolerations", "schedulingGates"):
            template["spec"].pop(name, None)
        metadata = template.setdefault("metadata", {})
        metadata.pop("labels", None)
        metadata.pop("annotations", None)
    return template


def _failure_policy_causes(spec: Object) -> list[Cause]:
    causes = []
    if spec["template"]["spec"].get("restartPolicy") != "Never":
        text = 'only "Never" is supported when podFailurePolicy is specified'
        causes.append(
            invalid_value("spec.template.spec.restartPolicy", spec["template"]["spec"].get("restartPolicy"), text)
        )
    actions = ("Count", "FailIndex", "FailJob", "Ignore")
    for i, rule in enumerate(spec["podFailurePolicy"].get("rules", ())):
        at = f"spec.podFailurePolicy.rules[{i}]"
        if rule.get("action") not in actions:
            causes.append(unsupported(f"{at}.action", rule.get("action", ""), actions))
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if bool(codes) == bool(conditions):
            text = "specifying one of OnExitCodes and OnPodConditions is required"
            causes.append(invalid_value(at, "{}", text))
        if codes:
            if codes.get("operator") not in ("In", "NotIn"):
                causes.append(unsupported(f"{at}.onExitCodes.operator", codes.get("operator", ""), ("In", "NotIn")))
            if not codes.get("values"):
                causes.append(invalid_value(f"{at}.onExitCodes.values", "[]", "at least one value is required"))
            elif codes.get("operator") == "In" and 0 in codes["values"]:
                causes.append(invalid_value(f"{at}.onExitCodes.values[0]", 0, "must not be 0 for the In operator"))
    return causes
