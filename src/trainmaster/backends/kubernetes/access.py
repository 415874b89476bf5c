"""What the server may do on a cluster, what it needs, and what to do about what it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.backends.kubernetes.connection import KubernetesConnection, KubernetesRefusedError

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a role."""

    group: str
    resource: str
    verbs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource


NEEDED = (
    Rule(group="batch", resource="jobs", verbs=("create", "get", "list", "watch", "patch", "delete")),
    Rule(group="", resource="pods", verbs=("list", "watch", "delete")),
    Rule(group="", resource="secrets", verbs=("create", "patch")),
    Rule(group="", resource="services", verbs=("create", "patch")),
)
"""In the namespace of the jobs. Without one of these, nothing works."""
OF_TRAINER = (
    Rule(
        group="trainer.kubeflow.org",
        resource="trainjobs",
        verbs=("create", "get", "list", "watch", "patch", "delete"),
    ),
    Rule(group="trainer.kubeflow.org", resource="trainingruntimes", verbs=("list",)),
)
"""In the namespace, where Kubeflow Trainer is installed: without these, jobs are Indexed Jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Useful:
    """A rule that the server does without where it has to."""

    rule: Rule
    without: str
    """What does not work then."""
    in_cluster: bool = False
    """It is for the whole cluster; else for the namespace of the jobs."""
    of_trainer: bool = False
    """It is of use where Kubeflow Trainer is installed."""


USEFUL = (
    Useful(
        rule=Rule(group="", resource="nodes", verbs=("list", "watch")),
        without="nodes are assumed as the option assumed_node says",
        in_cluster=True,
    ),
    Useful(
        rule=Rule(group="", resource="pods", verbs=("list", "watch")),
        without="what others hold on the nodes is not counted",
        in_cluster=True,
    ),
    Useful(
        rule=Rule(group="", resource="events", verbs=("list", "watch")),
        without="reasons for waiting are incomplete",
    ),
    Useful(
        rule=Rule(group="trainer.kubeflow.org", resource="clustertrainingruntimes", verbs=("list",)),
        without="TrainJobs can use the runtimes of the namespace only",
        in_cluster=True,
        of_trainer=True,
    ),
    Useful(
        rule=Rule(group="", resource="pods/log", verbs=("get",)),
        without="the logs of the TrainJobs of others are not shown",
        of_trainer=True,
    ),
)


def missing(connection: KubernetesConnection, rules: tuple[Rule, ...], namespace: str) -> Iterator[tuple[Rule, str]]:
    """Each rule and verb that the server lacks; an empty namespace stands for the whole cluster."""
    for rule in rules:
        for verb in rule.verbs:
            resource, _, subresource = rule.resource.partition("/")
            asked = {"group": rule.group, "resource": resource, "verb": verb}
            if subresource:
                asked["subresource"] = subresource
            if namespace:
                asked["namespace"] = namespace
            review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
            answer = connection.create(_REVIEWS, {**review, "spec": {"resourceAttributes": asked}})
            if not (answer.get("status") or {}).get("allowed"):
                yield rule, verb


def in_words(lacking: list[tuple[Rule, str]], namespace: str) -> str:
    """What is lacking, and the command that gives it; an empty namespace stands for the whole cluster.

    >>> in_words([(NEEDED[0], "create"), (NEEDED[0], "patch")], "team")
    'the server may not create, patch jobs.batch in the namespace team; let it: `kubectl create role trainmaster-jobs -n team --verb=create,patch --resource=jobs.batch` with a role binding'
    """  # noqa: E501
    parts, commands = [], []
    for rule in dict.fromkeys(rule for rule, _ in lacking):
        verbs = [verb for other, verb in lacking if other == rule]
        parts.append(f"{', '.join(verbs)} {rule.name}")
        kind, place = ("role", f" -n {namespace}") if namespace else ("clusterrole", "")
        named = f"trainmaster-{rule.resource.replace('/', '-')}"
        commands.append(f"`kubectl create {kind} {named}{place} --verb={','.join(verbs)} --resource={rule.name}`")
    where = f"in the namespace {namespace}" if namespace else "of the cluster"
    binding = "role binding" if namespace else "cluster role binding"
    return f"the server may not {'; '.join(parts)} {where}; let it: {', '.join(commands)} with a {binding}"


_REMEDIES = (
    ("exceeded quota", "ask for less, or have the quota of the namespace raised"),
    ("limitrange", "keep within the limits of the namespace"),
    ("maximum cpu usage", "keep within the limits of the namespace"),
    ("maximum memory usage", "keep within the limits of the namespace"),
    ("denied the request", "a policy of the cluster refuses it; its words say why"),
    ("violates podsecurity", "set what the policy asks for with the option pod_template"),
    ("no priorityclass", "change the option priority_classes to classes that `kubectl get priorityclasses` lists"),
    ("unknown field", "correct the option pod_template"),
    ("spec.template", "correct the option that the message names, or pod_template"),
)
"""What the API server says when it refuses an object, in the order in which it is looked for -> what to do."""


def refusal(error: KubernetesRefusedError, what: str, namespace: str) -> str:
    """Why the API server refused an object, in its words, with what to do."""
    words, lower = str(error), str(error).lower()
    if error.code == 404 and "namespaces" in lower:
        remedy = f"`kubectl create namespace {namespace}`, or change the option namespace"
        return f"there is no namespace {namespace}: {remedy}"
    if error.code == 403 and "cannot " in lower:
        return f"Kubernetes does not allow the server to make a {what}: {words}. To do: let it, by a role binding"
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in lower), "")
    return f"Kubernetes refuses the {what}: {words}" + (f". To do: {remedy}" if remedy else "")


def shortcomings(connection: KubernetesConnection, namespace: str, *, has_trainer: bool) -> Iterator[str]:
    """What does not work for want of a rule that is not needed otherwise."""
    for each in USEFUL:
        place = "" if each.in_cluster else namespace
        if (has_trainer or not each.of_trainer) and (lacking := list(missing(connection, (each.rule,), place))):
            yield f"{each.without}, since {in_words(lacking, place)}"


def is_transient(error: KubernetesRefusedError) -> bool:
    """Whether asking again later may help: quotas count what is there, and an object may be gone meanwhile, such as the
    Secret of a Job that is gone, whose owner only accounts may change that may delete it."""
    words = str(error).lower()
    return (
        error.code == 409
        or (error.code == 403 and ("exceeded quota" in words or "resource you can't delete" in words))
        or (error.code == 404 and "namespaces" not in words)
    )
