"""What a Kubernetes 1.32 control plane does, as far as Trainmaster relies on it.

The tests run on the test server, and on the cluster of `kubernetes_under_test.KUBECONFIG`: what they expect is what a
real one does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kubernetes_client import ApiError, KubernetesClient, Object, condition_of, wait_for
from kubernetes_launches import IMAGE

pytestmark = pytest.mark.long  # until a backend runs on it

ON_TERM_EXIT_0 = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(600)"
)


def config_map(name: str, **fields: Any) -> Object:
    return {"kind": "ConfigMap", "metadata": {"name": name, **fields.pop("metadata", {})}, **fields}


def container(*python: str, **fields: Any) -> Object:
    command = {"command": ["python3", "-c", *python]} if python else {}
    return {"name": "main", "image": IMAGE, "imagePullPolicy": "IfNotPresent", **command, **fields}


def pod(name: str, *python: str, spec: Object | None = None, **fields: Any) -> Object:
    plain = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "automountServiceAccountToken": False}
    return {
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {**plain, "containers": [container(*python, **fields)], **(spec or {})},
    }


def job(name: str, *python: str, spec: Object | None = None, pod_spec: Object | None = None, **fields: Any) -> Object:
    template = {"spec": pod("", *python, spec=pod_spec, **fields)["spec"]}
    return {
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template, "backoffLimit": 0, **(spec or {})},
    }


def indexed(count: int, **fields: Any) -> Object:
    return {"completions": count, "parallelism": count, "completionMode": "Indexed", **fields}


def status_of(found: Object, name: str = "main") -> Object:
    statuses = found["status"].get("containerStatuses") or []
    return next((each for each in statuses if each["name"] == name), {"state": {}})


def waits_for(reason: str) -> Any:
    return lambda found: status_of(found)["state"].get("waiting", {}).get("reason") == reason


def has_phase(*phases: str) -> Any:
    return lambda found: found["status"]["phase"] in phases


def until_up(api: KubernetesClient, name: str) -> None:
    """Wait until a program has said that it is ready for signals."""
    wait_for(lambda: api.get("Pod", name)["status"]["phase"] == "Running" and api.log(name), f"{name} to be up")


# -- requests and errors --


def test_discovery_names_the_resources(cluster: KubernetesClient) -> None:
    assert cluster.http.get("/readyz").text == "ok"
    assert cluster.ask("GET", "/version")["major"] == "1"
    groups = {group["name"] for group in cluster.ask("GET", "/apis")["groups"]}
    assert {"batch", "scheduling.k8s.io", "coordination.k8s.io", "apiextensions.k8s.io"} <= groups
    names = {each["name"]: each for each in cluster.ask("GET", "/apis/batch/v1")["resources"]}
    assert names["jobs"]["kind"] == "Job"
    assert names["jobs/status"]["namespaced"]


def test_request_with_wrong_token_is_unauthorized(cluster: KubernetesClient) -> None:
    stranger = cluster.within("default", token="wrong")
    with pytest.raises(ApiError) as caught:
        stranger.list("Pod")
    stranger.close()
    assert (caught.value.code, caught.value.reason, caught.value.message) == (401, "Unauthorized", "Unauthorized")


def test_missing_object_is_not_found(api: KubernetesClient) -> None:
    with pytest.raises(ApiError) as caught:
        api.get("Job", "none")
    assert caught.value.status == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": 'jobs.batch "none" not found',
        "reason": "NotFound",
        "details": {"name": "none", "group": "batch", "kind": "jobs"},
        "code": 404,
    }
    with pytest.raises(ApiError) as caught:
        api.ask("GET", f"/apis/batch/v1/namespaces/{api.namespace}/nothings")
    assert caught.value.message == "the server could not find the requested resource"


def test_second_object_of_a_name_already_exists(api: KubernetesClient) -> None:
    first = api.create(config_map("one", data={"a": "1"}))
    assert first["metadata"]["uid"]
    with pytest.raises(ApiError) as caught:
        api.create(config_map("one"))
    assert (caught.value.code, caught.value.reason) == (409, "AlreadyExists")
    assert caught.value.message == 'configmaps "one" already exists'


def test_generated_name_has_the_prefix(api: KubernetesClient) -> None:
    made = [api.create({"kind": "ConfigMap", "metadata": {"generateName": "run-"}}) for _ in range(2)]
    names = {each["metadata"]["name"] for each in made}
    assert len(names) == 2
    assert all(name.startswith("run-") and len(name) == 9 for name in names)


def test_namespace_that_is_missing_is_not_found(cluster: KubernetesClient) -> None:
    stray = cluster.within("absent")
    with pytest.raises(ApiError) as caught:
        stray.create(config_map("one"))
    stray.close()
    assert (caught.value.code, caught.value.message) == (404, 'namespaces "absent" not found')


def test_update_of_an_old_version_conflicts(api: KubernetesClient) -> None:
    old = api.create(config_map("one", data={"a": "1"}))
    new = api.replace({**old, "data": {"a": "2"}})
    assert int(new["metadata"]["resourceVersion"]) > int(old["metadata"]["resourceVersion"])
    assert api.replace(new)["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"]
    with pytest.raises(ApiError) as caught:
        api.replace({**old, "data": {"a": "3"}})
    assert (caught.value.code, caught.value.reason) == (409, "Conflict")
    assert caught.value.message == (
        'Operation cannot be fulfilled on configmaps "one": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )


def test_invalid_job_names_the_fields(api: KubernetesClient) -> None:
    with pytest.raises(ApiError) as caught:
        api.create(job("Bad_Name", "pass", pod_spec={"restartPolicy": "Always"}))
    assert (caught.value.code, caught.value.reason) == (422, "Invalid")
    assert caught.value.message.startswith('Job.batch "Bad_Name" is invalid: ')
    fields = {cause["field"]: cause for cause in caught.value.status["details"]["causes"]}
    assert fields["metadata.name"]["reason"] == "FieldValueInvalid"
    assert fields["spec.template.spec.restartPolicy"]["message"] == (
        'Required value: valid values: "OnFailure", "Never"'
    )


def test_template_of_a_job_is_immutable(api: KubernetesClient) -> None:
    api.create(job("fixed", "pass", spec={"suspend": True}))
    path = "/spec/template/spec/containers/0/image"
    with pytest.raises(ApiError) as caught:
        api.patch("Job", "fixed", [{"op": "replace", "path": path, "value": "other"}], "json-patch")
    assert caught.value.code == 422
    assert "field is immutable" in caught.value.message


def test_unknown_field_is_refused_or_dropped(api: KubernetesClient) -> None:
    wrong = job("typo", "pass", spec={"suspend": True, "backofLimit": 3})
    with pytest.raises(ApiError) as caught:
        api.create(wrong, fieldValidation="Strict")
    assert caught.value.code == 400
    assert 'strict decoding error: unknown field "spec.backofLimit"' in caught.value.message
    answer = api.answer("POST", api.path("Job"), {"apiVersion": "batch/v1", **wrong})
    assert "backofLimit" not in answer.json()["spec"]
    assert 'unknown field \\"spec.backofLimit\\"' in answer.headers["Warning"]


def test_value_of_a_wrong_type_is_refused(api: KubernetesClient) -> None:
    with pytest.raises(ApiError) as caught:
        api.create(pod("numbers", "pass", env=[{"name": "A", "value": 1}]))
    assert (caught.value.code, caught.value.reason) == (400, "BadRequest")
    assert "cannot unmarshal number into Go struct field" in caught.value.message


def test_dry_run_stores_nothing(api: KubernetesClient) -> None:
    made = api.create(job("dry", "pass"), dryRun="All")
    assert made["metadata"]["uid"]
    assert made["spec"]["backoffLimit"] == 0
    with pytest.raises(ApiError):
        api.get("Job", "dry")


def test_secret_has_its_text_as_base64(api: KubernetesClient) -> None:
    api.create({"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "value"}})
    found = api.get("Secret", "s")
    assert (found["data"], found["type"]) == ({"key": "dmFsdWU="}, "Opaque")
    assert "stringData" not in found


# -- lists, patches and apply --


def test_selectors_choose_objects(api: KubernetesClient) -> None:
    for name, tier in (("a", "front"), ("b", "back"), ("c", "")):
        labels = {"tier": tier} if tier else {"other": "x"}
        api.create(config_map(name, metadata={"labels": labels}))

    def names(**query: str) -> list[str]:
        return [
            each["metadata"]["name"] for each in api.list("ConfigMap", **query) if len(each["metadata"]["name"]) == 1
        ]

    assert names(labelSelector="tier=front") == ["a"]
    assert names(labelSelector="tier!=front") == ["b", "c"]
    assert names(labelSelector="tier in (front,back)") == ["a", "b"]
    assert names(labelSelector="tier notin (front),tier") == ["b"]
    assert names(labelSelector="!tier,other") == ["c"]
    assert names(fieldSelector="metadata.name=b") == ["b"]
    for kind, message in (
        ("ConfigMap", '"data.x" is not a known field selector: only "metadata.name", "metadata.namespace"'),
        ("Job", 'field label "data.x" not supported for Job'),
        ("Pod", "field label not supported: data.x"),
    ):
        with pytest.raises(ApiError) as caught:
            api.list(kind, fieldSelector="data.x=1")
        assert message in caught.value.message


def test_pages_of_a_list_continue(api: KubernetesClient) -> None:
    for i in range(5):
        api.create(config_map(f"page-{i}", metadata={"labels": {"page": "yes"}}))
    found, token, versions = [], "", set()
    while True:
        page = api.ask("GET", api.path("ConfigMap"), labelSelector="page=yes", limit=2, **{"continue": token})
        found += [each["metadata"]["name"] for each in page["items"]]
        versions.add(page["metadata"]["resourceVersion"])
        token = page["metadata"].get("continue", "")
        if not token:
            break
    assert found == [f"page-{i}" for i in range(5)]
    assert len(versions) == 1


def test_patches_merge(api: KubernetesClient) -> None:
    api.create(config_map("one", data={"a": "1", "b": "2"}))
    assert api.patch("ConfigMap", "one", {"data": {"a": None, "c": "3"}})["data"] == {"b": "2", "c": "3"}
    operations = [{"op": "test", "path": "/data/b", "value": "2"}, {"op": "replace", "path": "/data/b", "value": "4"}]
    assert api.patch("ConfigMap", "one", operations, "json-patch")["data"] == {"b": "4", "c": "3"}
    with pytest.raises(ApiError) as caught:
        api.patch("ConfigMap", "one", operations, "json-patch")
    assert (caught.value.code, caught.value.reason) == (422, "Invalid")
    made = api.create(job("strategic", "pass", spec={"suspend": True}))
    assert made["metadata"]["generation"] == 1
    patched = api.patch("Job", "strategic", {"spec": {"parallelism": 2}}, "strategic-merge")
    assert patched["metadata"]["generation"] == 2


def test_apply_merges_and_conflicts_by_manager(api: KubernetesClient) -> None:
    def apply(manager: str, data: dict[str, str], **query: Any) -> Object:
        wanted = {"apiVersion": "v1", **config_map("shared", data=data)}
        return api.patch("ConfigMap", "shared", wanted, "apply", fieldManager=manager, **query)

    assert apply("one", {"a": "1", "b": "1"})["data"] == {"a": "1", "b": "1"}
    assert apply("two", {"c": "2"})["data"] == {"a": "1", "b": "1", "c": "2"}
    with pytest.raises(ApiError) as caught:
        apply("two", {"a": "2", "c": "2"})
    assert (caught.value.code, caught.value.reason) == (409, "Conflict")
    assert caught.value.message == 'Apply failed with 1 conflict: conflict with "one": .data.a'
    cause = caught.value.status["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldManagerConflict", ".data.a")
    assert apply("two", {"a": "2", "c": "2"}, force="true")["data"] == {"a": "2", "b": "1", "c": "2"}
    # A field that its only manager no longer wants goes; one that it lost to another stays.
    assert apply("one", {})["data"] == {"a": "2", "c": "2"}


# -- deletion and owners --


def test_precondition_guards_a_deletion(api: KubernetesClient) -> None:
    made = api.create(config_map("one"))
    with pytest.raises(ApiError) as caught:
        api.delete("ConfigMap", "one", preconditions={"uid": "other"})
    assert (caught.value.code, caught.value.reason) == (409, "Conflict")
    answer = api.delete("ConfigMap", "one", preconditions={"uid": made["metadata"]["uid"]})
    assert (answer["status"], answer["details"]["uid"]) == ("Success", made["metadata"]["uid"])


def test_finalizer_holds_an_object(api: KubernetesClient) -> None:
    api.create(config_map("held", metadata={"finalizers": ["tests.example/hold"]}))
    api.delete("ConfigMap", "held")
    assert api.get("ConfigMap", "held")["metadata"]["deletionTimestamp"]
    api.patch("ConfigMap", "held", {"metadata": {"finalizers": None}})
    api.until_gone("ConfigMap", "held")


def test_collection_is_deleted_by_selector(api: KubernetesClient) -> None:
    for name in ("a", "b"):
        api.create(config_map(name, metadata={"labels": {"name": name}}))
    api.ask("DELETE", api.path("ConfigMap"), labelSelector="name=a")
    api.until_gone("ConfigMap", "a")
    assert api.get("ConfigMap", "b")


@pytest.mark.parametrize("policy", ["Background", "Foreground", "Orphan"])
def test_dependents_follow_their_owner(api: KubernetesClient, policy: str) -> None:
    owner = api.create(config_map("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    api.create(config_map("own", metadata={"ownerReferences": [{**reference, "blockOwnerDeletion": True}]}))
    # A collector that has not seen the dependent yet would not find it.
    wait_for(lambda: len(api.list("ConfigMap")) >= 2, "both")
    api.delete("ConfigMap", "owner", propagationPolicy=policy)
    api.until_gone("ConfigMap", "owner")
    if policy == "Orphan":
        api.until("ConfigMap", "own", lambda found: "ownerReferences" not in found["metadata"])
    else:
        api.until_gone("ConfigMap", "own")


# -- watches --


def test_watch_shows_what_enters_and_leaves_a_selector(api: KubernetesClient) -> None:
    start = api.ask("GET", api.path("ConfigMap"))["metadata"]["resourceVersion"]
    with api.watch("ConfigMap", resourceVersion=start, labelSelector="watched=yes") as events:
        api.create(config_map("one"))
        api.patch("ConfigMap", "one", {"metadata": {"labels": {"watched": "yes"}}})
        api.patch("ConfigMap", "one", {"data": {"a": "1"}})
        api.patch("ConfigMap", "one", {"metadata": {"labels": {"watched": "no"}}})
        api.patch("ConfigMap", "one", {"metadata": {"labels": {"watched": "yes"}}})
        api.delete("ConfigMap", "one")
        seen = [next(events) for _ in range(5)]
    assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(set(versions))


def test_watch_without_version_begins_with_what_there_is(api: KubernetesClient) -> None:
    api.create(config_map("one"))
    with api.watch("ConfigMap", fieldSelector="metadata.name=one") as events:
        assert (first := next(events))["type"] == "ADDED"
        assert first["object"]["metadata"]["name"] == "one"


def test_watch_ends_with_its_timeout(api: KubernetesClient) -> None:
    start = api.ask("GET", api.path("ConfigMap"))["metadata"]["resourceVersion"]
    query = {"resourceVersion": start, "fieldSelector": "metadata.name=none", "timeoutSeconds": 1}
    with api.watch("ConfigMap", **query) as events:
        assert list(events) == []


def test_watch_of_a_forgotten_version_is_expired(api: KubernetesClient) -> None:
    with api.watch("ConfigMap", resourceVersion="1") as events:
        event = next(events)
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
    assert event["object"]["message"].startswith("too old resource version: 1 (")


# -- jobs --


def test_indexed_job_runs_its_pods(api: KubernetesClient) -> None:
    api.create(
        {
            "kind": "Service",
            "metadata": {"name": "ring"},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": "ring"}},
        }
    )
    program = """
import os, socket, time
index, place, met = os.environ["JOB_COMPLETION_INDEX"], None, False
while not met:  # the first pod's name is gone once it has ended: it waits for the second
    try:
        place = socket.gethostbyname("ring-0.ring"), 29500
        if index == "0":
            with socket.create_server(place) as server:
                server.accept()
        else:
            socket.create_connection(place).close()
        met = True
    except OSError:
        time.sleep(0.2)
print(index, socket.gethostname(), place[0])
"""
    start = api.ask("GET", api.path("Pod"))["metadata"]["resourceVersion"]
    api.create(job("ring", program, spec=indexed(2), pod_spec={"subdomain": "ring"}))
    with api.watch("Pod", resourceVersion=start) as events:
        added = (event["object"] for event in events if event["type"] == "ADDED")
        pods = sorted((next(added) for _ in range(2)), key=lambda each: str(each["spec"]["hostname"]))
    assert [each["spec"]["hostname"] for each in pods] == ["ring-0", "ring-1"]
    for i, each in enumerate(pods):
        metadata = each["metadata"]
        assert metadata["name"].startswith(f"ring-{i}-")
        assert metadata["annotations"]["batch.kubernetes.io/job-completion-index"] == str(i)
        assert metadata["labels"]["batch.kubernetes.io/job-name"] == "ring"
        assert "batch.kubernetes.io/job-tracking" in metadata["finalizers"]
        assert metadata["ownerReferences"][0]["controller"]
    ended = api.until_condition("Job", "ring", "Complete")
    status = ended["status"]
    assert (status["succeeded"], status["completedIndexes"]) == (2, "0,1")
    assert "completionTime" in status
    assert "active" not in status
    assert [each["type"] for each in status["conditions"]] == ["SuccessCriteriaMet", "Complete"]
    lines = [api.log(each["metadata"]["name"]).split() for each in pods]
    assert [line[:2] for line in lines] == [["0", "ring-0"], ["1", "ring-1"]]
    address = api.get("Pod", pods[0]["metadata"]["name"])["status"]["podIP"]
    assert {line[2] for line in lines} == {address}
    last = api.get("Pod", pods[0]["metadata"]["name"])
    assert "finalizers" not in last["metadata"]
    assert last["status"]["phase"] == "Succeeded"
    assert status_of(last)["state"]["terminated"]["reason"] == "Completed"
    assert api.events_of(ended, "SuccessfulCreate")
    assert api.events_of(ended, "Completed")
    for reason in ("Scheduled", "Created", "Started"):
        assert api.events_of(last, reason)


def test_failed_pod_fails_the_job(api: KubernetesClient) -> None:
    api.create(job("fails", "import sys; print('bad', file=sys.stderr); sys.exit(7)", spec=indexed(1)))
    ended = api.until_condition("Job", "fails", "Failed")
    conditions = ended["status"]["conditions"]
    assert [each["type"] for each in conditions] == ["FailureTarget", "Failed"]
    assert {each["reason"] for each in conditions} == {"BackoffLimitExceeded"}
    assert conditions[1]["message"] == "Job has reached the specified backoff limit"
    assert ended["status"]["failed"] == 1
    (found,) = api.pods_of("fails")
    state = status_of(found)["state"]["terminated"]
    assert (found["status"]["phase"], state["exitCode"], state["reason"]) == ("Failed", 7, "Error")
    assert api.log(found["metadata"]["name"]) == "bad\n"


def test_job_that_fails_deletes_its_pods_before_it_says_so(api: KubernetesClient) -> None:
    program = "import os, time; time.sleep(600 * (os.environ['JOB_COMPLETION_INDEX'] == '0')); raise SystemExit(7)"
    made = api.create(job("falls", program, spec=indexed(2)))
    since = made["metadata"]["resourceVersion"]

    def first(kind: str, holds: Any) -> int:
        with api.watch(kind, resourceVersion=since) as events:
            found = (event["object"] for event in events)
            return next(int(each["metadata"]["resourceVersion"]) for each in found if holds(each))

    says_so = first("Job", lambda each: condition_of(each, "FailureTarget"))
    deletes = first("Pod", lambda each: "deletionTimestamp" in each["metadata"])
    assert deletes < says_so


def test_failed_pod_is_replaced_within_the_backoff_limit(api: KubernetesClient) -> None:
    api.create(job("again", "raise SystemExit(1)", spec=indexed(1, backoffLimit=1)))
    ended = api.until_condition("Job", "again", "Failed")
    assert ended["status"]["failed"] == 2
    assert len(api.pods_of("again", 2)) == 2


def test_suspended_job_loses_its_pods_and_resumes(api: KubernetesClient) -> None:
    api.create(job("pause", ON_TERM_EXIT_0, spec=indexed(1)))
    (first,) = api.pods_of("pause")
    until_up(api, first["metadata"]["name"])
    api.patch("Job", "pause", {"spec": {"suspend": True}})
    suspended = api.until_condition("Job", "pause", "Suspended")
    assert condition_of(suspended, "Suspended")["reason"] == "JobSuspended"
    api.until_gone("Pod", first["metadata"]["name"])
    assert "failed" not in api.get("Job", "pause")["status"]
    api.patch("Job", "pause", {"spec": {"suspend": False}})
    (second,) = api.pods_of("pause")
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    resumed = api.until("Job", "pause", lambda found: condition_of(found, "Suspended").get("status") == "False")
    assert condition_of(resumed, "Suspended")["reason"] == "JobResumed"
    api.delete("Job", "pause", propagationPolicy="Background")


def test_suspended_job_makes_no_pods(api: KubernetesClient) -> None:
    api.create(job("later", "pass", spec=indexed(1, suspend=True)))
    found = api.until_condition("Job", "later", "Suspended")
    assert "startTime" not in found["status"]
    assert api.list("Pod") == []


def test_failure_policy_fails_the_job_by_exit_code(api: KubernetesClient) -> None:
    rule = {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "In", "values": [42]}}
    spec = indexed(1, backoffLimit=5, podFailurePolicy={"rules": [rule]})
    made = api.create(job("policy", "raise SystemExit(42)", spec=spec))
    assert made["spec"]["podReplacementPolicy"] == "Failed"
    ended = api.until_condition("Job", "policy", "Failed")
    assert condition_of(ended, "Failed")["reason"] == "PodFailurePolicy"
    name = api.pods_of("policy")[0]["metadata"]["name"]
    assert condition_of(ended, "Failed")["message"] == (
        f"Container main for pod {api.namespace}/{name} failed with exit code 42 matching FailJob rule at index 0"
    )


def test_job_ends_with_its_deadline(api: KubernetesClient) -> None:
    api.create(job("late", ON_TERM_EXIT_0, spec=indexed(1, activeDeadlineSeconds=1)))
    ended = api.until_condition("Job", "late", "Failed")
    assert condition_of(ended, "Failed")["reason"] == "DeadlineExceeded"
    assert condition_of(ended, "Failed")["message"] == "Job was active longer than specified deadline"


def test_job_is_deleted_after_its_time(api: KubernetesClient) -> None:
    api.create(job("short", "pass", spec=indexed(1, ttlSecondsAfterFinished=0)))
    api.until_gone("Job", "short")
    wait_for(lambda: not api.list("Pod"), "the pod to go")


def test_deleted_job_leaves_its_pods_unless_asked(api: KubernetesClient) -> None:
    for name in ("orphaning", "collecting"):
        api.create(job(name, ON_TERM_EXIT_0, spec=indexed(1)))
    names = {name: api.pods_of(name)[0]["metadata"]["name"] for name in ("orphaning", "collecting")}
    answer = api.answer("DELETE", api.path("Job", "orphaning"))
    assert "child pods are preserved by default when jobs are deleted" in answer.headers["Warning"]
    api.delete("Job", "collecting", propagationPolicy="Background")
    api.until_gone("Pod", names["collecting"])
    left = api.until("Pod", names["orphaning"], lambda found: "ownerReferences" not in found["metadata"])
    assert "deletionTimestamp" not in left["metadata"]


# -- pods --


def test_log_is_followed_and_cut(api: KubernetesClient) -> None:
    program = "import time\nfor i in range(5): print('line', i, flush=True); time.sleep(0.1)"
    api.create(pod("talks", program))
    api.until("Pod", "talks", has_phase("Running", "Succeeded"))
    assert api.log("talks", follow="true") == "".join(f"line {i}\n" for i in range(5))
    assert api.log("talks", tailLines=2) == "line 3\nline 4\n"
    assert api.log("talks", sinceSeconds=3600).count("\n") == 5
    first = api.log("talks", timestamps="true").split("\n")[0]
    assert first.endswith("Z line 0")
    with pytest.raises(ApiError) as caught:
        api.log("talks", container="other")
    assert caught.value.message == "container other is not valid for pod talks"
    with pytest.raises(ApiError) as caught:
        api.log("talks", previous="true")
    assert caught.value.message == 'previous terminated container "main" in pod "talks" not found'


def test_container_is_restarted_on_failure(api: KubernetesClient) -> None:
    program = """
import os, sys, time
if not os.path.exists("/state/second"):
    open("/state/second", "w").close()
    print("first", flush=True)
    sys.exit(3)
print("second", flush=True)
time.sleep(5)
"""
    mounts = [{"name": "state", "mountPath": "/state"}]
    volumes = [{"name": "state", "emptyDir": {}}]
    api.create(pod("again", program, spec={"restartPolicy": "OnFailure", "volumes": volumes}, volumeMounts=mounts))
    found = api.until("Pod", "again", lambda each: "terminated" in status_of(each).get("lastState", {}))
    assert status_of(found)["lastState"]["terminated"]["exitCode"] == 3
    assert api.log("again", previous="true") == "first\n"
    found = api.until("Pod", "again", has_phase("Succeeded"))
    assert status_of(found)["restartCount"] == 1
    assert api.log("again") == "second\n"
    # Of the containers that have ended, the kubelet keeps one.
    assert status_of(found)["lastState"] == {}
    with pytest.raises(ApiError) as caught:
        api.log("again", previous="true")
    assert caught.value.message == 'previous terminated container "main" in pod "again" not found'


def test_pod_gets_environment_and_volumes(api: KubernetesClient) -> None:
    api.create(config_map("code", data={"main.py": "print('from the config map')", "other": "x"}))
    api.create({"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"token": "t0p", "more": "m"}})
    program = """
import os, stat
exec(open("/code/main.py").read())
print(sorted(name for name in os.listdir("/code") if not name.startswith(".")))
print(open("/keys/below/key").read(), oct(stat.S_IMODE(os.stat("/keys/below/key").st_mode)))
print(os.environ["TOKEN"], os.environ["WORDS"], os.environ["NAME"], os.environ["PRE_other"], os.getcwd())
print(open("/shared/init").read(), open("/about/labels").read())
"""
    environment = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "WORDS", "value": "$(TOKEN)-$$(TOKEN)-$(NONE)"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    shared = {"name": "shared", "mountPath": "/shared"}
    mounts = [
        {"name": "code", "mountPath": "/code"},
        {"name": "keys", "mountPath": "/keys"},
        {"name": "about", "mountPath": "/about"},
        shared,
    ]
    secret_item = {"key": "token", "path": "below/key", "mode": 0o400}
    volumes = [
        {"name": "code", "configMap": {"name": "code", "items": [{"key": "main.py", "path": "main.py"}]}},
        {"name": "keys", "secret": {"secretName": "keys", "items": [secret_item]}},
        {"name": "about", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "shared", "emptyDir": {"medium": "Memory"}},
    ]
    first = container("open('/shared/init', 'w').write('initialized')", volumeMounts=[shared])
    made = pod(
        "full",
        program,
        spec={"volumes": volumes, "initContainers": [{**first, "name": "first"}]},
        env=environment,
        envFrom=[{"prefix": "PRE_", "configMapRef": {"name": "code"}}],
        volumeMounts=mounts,
        workingDir="/shared",
    )
    made["metadata"]["labels"] = {"a": "b"}
    api.create(made)
    found = api.until("Pod", "full", has_phase("Succeeded", "Failed"))
    assert api.log("full").splitlines() == [
        "from the config map",
        "['main.py']",
        "t0p 0o400",
        "t0p t0p-$(TOKEN)-$(NONE) full x /shared",
        'initialized a="b"',
    ]
    assert found["status"]["initContainerStatuses"][0]["state"]["terminated"]["reason"] == "Completed"


def test_failed_init_container_fails_the_pod(api: KubernetesClient) -> None:
    first = {**container("raise SystemExit(4)"), "name": "first"}
    api.create(pod("uninitialized", "pass", spec={"initContainers": [first]}))
    found = api.until("Pod", "uninitialized", has_phase("Failed"))
    assert condition_of(found, "Initialized")["status"] == "False"
    assert status_of(found)["state"]["waiting"]["reason"] == "PodInitializing"


def test_missing_secret_keeps_a_pod_waiting(api: KubernetesClient) -> None:
    variable = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "a"}}}
    api.create(pod("no-secret", "pass", env=[variable]))
    found = api.until("Pod", "no-secret", waits_for("CreateContainerConfigError"))
    assert status_of(found)["state"]["waiting"]["message"] == 'secret "none" not found'
    missing = {"volumes": [{"name": "v", "secret": {"secretName": "none"}}]}
    api.create(pod("not-mounted", "pass", spec=missing))
    api.until("Pod", "not-mounted", has_phase("Succeeded"))
    api.create(pod("no-volume", "pass", spec=missing, volumeMounts=[{"name": "v", "mountPath": "/v"}]))
    (event,) = api.events_of(api.get("Pod", "no-volume"), "FailedMount")
    assert event["message"] == 'MountVolume.SetUp failed for volume "v" : secret "none" not found'
    with pytest.raises(ApiError) as caught:
        api.log("no-volume")
    assert caught.value.message == 'container "main" in pod "no-volume" is waiting to start: ContainerCreating'
    api.create({"kind": "Secret", "metadata": {"name": "none"}, "stringData": {"a": "1"}})
    api.until("Pod", "no-secret", has_phase("Succeeded"))


def test_command_that_does_not_exist_fails_to_start(api: KubernetesClient) -> None:
    api.create(pod("no-command", command=["no-such-program"]))
    state = status_of(api.until("Pod", "no-command", has_phase("Failed")))["state"]["terminated"]
    assert (state["reason"], state["exitCode"]) == ("StartError", 128)
    assert 'exec: "no-such-program": executable file not found in $PATH' in state["message"]


def test_container_over_its_memory_limit_is_killed(api: KubernetesClient) -> None:
    resources = {"limits": {"memory": "64Mi"}}
    api.create(pod("hungry", "x = b'a' * 300_000_000", resources=resources))
    state = status_of(api.until("Pod", "hungry", has_phase("Failed")))["state"]["terminated"]
    assert (state["reason"], state["exitCode"]) == ("OOMKilled", 137)


@pytest.mark.parametrize(("handler", "phase"), [("sys.exit(0)", "Succeeded"), ("sys.exit(3)", "Failed")])
def test_deleted_pod_gets_time_to_end(api: KubernetesClient, handler: str, phase: str) -> None:
    program = (
        f"import signal, sys, time\nsignal.signal(15, lambda *_: {handler})\nprint('up', flush=True)\ntime.sleep(600)"
    )
    made = api.create(pod("ends", program, spec={"terminationGracePeriodSeconds": 60}))
    until_up(api, "ends")
    with api.watch("Pod", resourceVersion=made["metadata"]["resourceVersion"]) as events:
        answer = api.delete("Pod", "ends")
        assert answer["metadata"]["deletionGracePeriodSeconds"] == 60
        seen = []
        for event in events:
            seen.append(event)
            if event["type"] == "DELETED":
                break
    last = seen[-1]["object"]
    assert last["status"]["phase"] == phase
    assert status_of(last)["state"]["terminated"]["exitCode"] == (0 if phase == "Succeeded" else 3)


def test_pod_that_ignores_the_signal_is_killed(api: KubernetesClient) -> None:
    # The first process of a container ignores the signals that it does not handle.
    api.create(pod("stays", "print('up', flush=True); import time; time.sleep(600)"))
    until_up(api, "stays")
    api.delete("Pod", "stays", gracePeriodSeconds=1)
    api.until_gone("Pod", "stays")


def test_evicted_pod_is_a_disruption_target(api: KubernetesClient) -> None:
    made = api.create(pod("target", ON_TERM_EXIT_0))
    until_up(api, "target")
    with api.watch("Pod", resourceVersion=made["metadata"]["resourceVersion"]) as events:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "target"}}
        api.ask("POST", f"{api.path('Pod', 'target')}/eviction", eviction)
        conditions = (condition_of(event["object"], "DisruptionTarget") for event in events)
        found = next(condition for condition in conditions if condition)
    assert (found["reason"], found["message"]) == ("EvictionByEvictionAPI", "Eviction API: evicting")
    api.until_gone("Pod", "target")


def test_readiness_follows_a_probe(api: KubernetesClient) -> None:
    probe = {"exec": {"command": ["cat", "/state/ready"]}, "periodSeconds": 1}
    mounts = [{"name": "state", "mountPath": "/state"}]
    program = "import time; time.sleep(1); open('/state/ready', 'w').close(); time.sleep(600)"
    made = pod("probed", program, readinessProbe=probe, volumeMounts=mounts)
    made["spec"] |= {"volumes": [{"name": "state", "emptyDir": {}}], "terminationGracePeriodSeconds": 1}
    api.create(made)
    found = api.until("Pod", "probed", has_phase("Running"))
    assert condition_of(found, "Ready")["status"] == "False"
    api.until("Pod", "probed", lambda found: condition_of(found, "Ready")["status"] == "True")


# -- scheduling --


def test_unsatisfiable_pod_waits_until_a_node_has_room(api: KubernetesClient, unit: str) -> None:
    def wants(name: str, count: int) -> Object:
        return pod(name, "pass", resources={"limits": {unit: str(count)}})

    made = api.create(wants("large", 5))
    found = api.until("Pod", "large", lambda each: condition_of(each, "PodScheduled").get("status") == "False")
    condition = condition_of(found, "PodScheduled")
    total = len(api.list("Node"))
    assert condition["reason"] == "Unschedulable"
    assert condition["message"].startswith(f"0/{total} nodes are available: {total} Insufficient {unit}")
    assert "No preemption victims found for incoming pod" in condition["message"]
    (event,) = api.events_of(made, "FailedScheduling")
    assert event["message"] == condition["message"]
    node = next(each for each in api.list("Node") if unit in each["status"]["allocatable"])["metadata"]["name"]
    more = {"status": {"capacity": {unit: "5"}, "allocatable": {unit: "5"}}}
    api.patch("Node", node, more, below="/status")
    assert api.until("Pod", "large", has_phase("Succeeded"))["spec"]["nodeName"] == node


def test_pod_of_higher_priority_preempts(api: KubernetesClient, unit: str) -> None:
    classes = {name: f"{name}-{secrets.token_hex(3)}" for name in ("low", "high")}
    for name, value in (("low", 10), ("high", 1000)):
        api.create({"kind": "PriorityClass", "metadata": {"name": classes[name]}, "value": value})
    needs = {"limits": {unit: "4"}}
    victim = api.create(pod("victim", ON_TERM_EXIT_0, spec={"priorityClassName": classes["low"]}, resources=needs))
    assert victim["spec"]["priority"] == 10
    until_up(api, "victim")
    with api.watch(
        "Pod", resourceVersion=victim["metadata"]["resourceVersion"], fieldSelector="metadata.name=victim"
    ) as events:
        api.create(pod("winner", "pass", spec={"priorityClassName": classes["high"]}, resources=needs))
        last = next(event["object"] for event in events if event["type"] == "DELETED")
    target = condition_of(last, "DisruptionTarget")
    assert (target["status"], target["reason"]) == ("True", "PreemptionByScheduler")
    assert target["message"] == "default-scheduler: preempting to accommodate a higher priority pod"
    # A handler that exits with 0 makes a success of it.
    assert last["status"]["phase"] == "Succeeded"
    assert api.events_of(victim, "Preempted")
    api.until("Pod", "winner", has_phase("Succeeded"))
    for name in classes.values():
        api.delete("PriorityClass", name)


def test_preempted_pod_of_a_job_counts_unless_ignored(api: KubernetesClient) -> None:
    rule = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    program = ON_TERM_EXIT_0.replace("sys.exit(0)", "sys.exit(143)")
    api.create(job("ignores", program, spec=indexed(1, podFailurePolicy={"rules": [rule]})))
    (first,) = api.pods_of("ignores")
    name = first["metadata"]["name"]
    until_up(api, name)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    api.ask("POST", f"{api.path('Pod', name)}/eviction", eviction)
    wait_for(lambda: any(each["metadata"]["name"] != name for each in api.pods_of("ignores")), "another pod")
    found = api.get("Job", "ignores")["status"]
    assert "failed" not in found
    assert not condition_of({"status": found}, "Failed")


def test_unknown_priority_class_is_forbidden(api: KubernetesClient) -> None:
    with pytest.raises(ApiError) as caught:
        api.create(pod("one", "pass", spec={"priorityClassName": "no-such-class"}))
    assert (caught.value.code, caught.value.reason) == (403, "Forbidden")
    assert caught.value.message == 'pods "one" is forbidden: no PriorityClass with name no-such-class was found'


def test_node_selector_keeps_a_pod_waiting(api: KubernetesClient) -> None:
    api.create(pod("picky", "pass", spec={"nodeSelector": {"tests.example/none": "yes"}}))
    found = api.until("Pod", "picky", lambda each: condition_of(each, "PodScheduled").get("status") == "False")
    assert "node(s) didn't match Pod's node affinity/selector" in condition_of(found, "PodScheduled")["message"]


# -- access, custom resources, kubectl --


def test_role_limits_a_service_account(api: KubernetesClient) -> None:
    api.create({"kind": "ServiceAccount", "metadata": {"name": "runner"}})
    rules = [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "list"]}]
    api.create({"kind": "Role", "metadata": {"name": "runner"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "runner", "namespace": api.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "runner"}
    api.create({"kind": "RoleBinding", "metadata": {"name": "runner"}, "subjects": [subject], "roleRef": role})
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    token = api.ask("POST", f"{api.path('ServiceAccount', 'runner')}/token", wanted)["status"]["token"]
    runner = api.within(api.namespace, token=token)

    def may_list() -> bool:
        try:
            return runner.list("Job") == []
        except ApiError:
            return False

    wait_for(may_list, "the role to hold")
    with pytest.raises(ApiError) as caught:
        runner.list("Pod")
    assert (caught.value.code, caught.value.reason) == (403, "Forbidden")
    assert caught.value.message == (
        f'pods is forbidden: User "system:serviceaccount:{api.namespace}:runner" cannot list resource "pods" '
        f'in API group "" in the namespace "{api.namespace}"'
    )
    with pytest.raises(ApiError) as caught:
        runner.list("Node")
    assert caught.value.message.endswith('cannot list resource "nodes" in API group "" at the cluster scope')
    runner.close()


def test_custom_resource_has_status_and_generation(api: KubernetesClient) -> None:
    group = f"g{secrets.token_hex(3)}.tests.example"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    names = {"plural": "trainjobs", "singular": "trainjob", "kind": "TrainJob"}
    api.create(
        {
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"trainjobs.{group}"},
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
        }
    )
    api.until_condition("CustomResourceDefinition", f"trainjobs.{group}", "Established")
    path = f"/apis/{group}/v1alpha1/namespaces/{api.namespace}/trainjobs"
    body = {"apiVersion": f"{group}/v1alpha1", "kind": "TrainJob", "metadata": {"name": "one"}, "spec": {"a": 1}}

    def served() -> Any:
        try:
            return api.ask("POST", path, {**body, "status": {"lost": True}})
        except ApiError:
            return None

    made = wait_for(served, "the resource to be served")
    assert made["metadata"]["generation"] == 1
    assert "status" not in made
    done = api.ask("PATCH", f"{path}/one/status", {"status": {"phase": "x"}, "spec": {"a": 2}}, media="merge")
    assert (done["status"], done["spec"], done["metadata"]["generation"]) == ({"phase": "x"}, {"a": 1}, 1)
    changed = api.ask("PATCH", f"{path}/one", {"spec": {"a": 2}}, media="merge")
    assert (changed["spec"], changed["metadata"]["generation"]) == ({"a": 2}, 2)
    with pytest.raises(ApiError) as caught:
        api.ask("PATCH", f"{path}/one", {"spec": {"a": 2}}, media="strategic-merge")
    assert caught.value.code == 415
    api.delete("CustomResourceDefinition", f"trainjobs.{group}")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_applies_waits_and_deletes(api: KubernetesClient, tmp_path: Path) -> None:
    def kubectl(*arguments: str) -> str:
        command = ["kubectl", "--kubeconfig", str(api.kubeconfig), "--namespace", api.namespace, *arguments]
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    file = tmp_path / "job.yaml"
    file.write_text(
        f"""
apiVersion: batch/v1
kind: Job
metadata: {{name: hello}}
spec:
  template:
    spec:
      restartPolicy: Never
      containers: [{{name: main, image: {IMAGE}, command: [python3, -c, "print('hello')"]}}]
"""
    )
    assert kubectl("apply", "--server-side", "-f", str(file)) == "job.batch/hello serverside-applied\n"
    kubectl("wait", "--for=condition=complete", "job/hello", f"--timeout={300}s")
    assert kubectl("logs", "-f", "job/hello") == "hello\n"
    assert "Completed" in kubectl("get", "pods")
    assert "1/1" in kubectl("get", "jobs")
    assert "SuccessfulCreate" in kubectl("describe", "job", "hello")
    assert 'job.batch "hello" deleted' in kubectl("delete", "job", "hello")
    kubectl("wait", "--for=delete", "pod", "-l", "job-name=hello", "--timeout=300s")
    assert kubectl("apply", "-f", str(file)) == "job.batch/hello created\n"
