"""The routes of workers: they move a run directory to the server, and wishes back."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_world import Api, Served, World, wait_for

from patience import PATIENCE_S
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import log_stream
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Share

STREAM = log_stream(0, "main", 0, "out")
CLAIMANT = {"nonce": "n1", "pid": 10, "start_time": 5, "boot_id": "b", "host": "h"}


class Worker:
    """A worker with its token."""

    def __init__(self, api: Api, served: Served, job: Job) -> None:
        self.job = job
        self.attempt_id = f"{job.job_id}.{job.live.number}"
        self.api = api
        self.http = httpx.Client(
            base_url=f"{served.url}/v1/worker/attempts/{self.attempt_id}/",
            headers={"Authorization": f"Bearer {job.live.token}"},
            verify=False,
            timeout=PATIENCE_S,
        )

    @property
    def rank_headers(self) -> dict[str, str]:
        """The credentials of the attempt's ranks."""
        return {"Authorization": f"Bearer {self.job.live.rank_token}"}

    def call(self, method: str, path: str, expect: int = 200, **options: Any) -> Any:
        return Api(http=self.http, world=self.api.world, account_id="", key="").call(method, path, expect, **options)


@pytest.fixture
def worker(api: Api, served: Served, world: World) -> Iterator[Worker]:
    job_id = api.submit()
    world.queue(job_id)
    worker = Worker(api, served, world.place(job_id, Share(node_id="a"), Share(node_id="b")))
    yield worker
    worker.http.close()


def test_request_is_what_was_laid_out(worker: Worker, world: World) -> None:
    request = AttemptRequest.from_json(worker.call("GET", "request"))
    assert request == world.directory(worker.job).request()
    assert request.attempt_id == worker.attempt_id


def test_request_of_a_job_with_thousands_of_files_is_served_whole(api: Api, served: Served, world: World) -> None:
    content = b"content"
    digest = hashlib.sha256(content).hexdigest()
    api.call("PUT", f"/v1/blobs/{digest}", 201, content=content)
    files = [{"path": f"package/module_{number:05}/main.py", "sha256": digest} for number in range(8192)]
    job_id = api.submit(workload={"kind": "command", "argv": ["x"], "files": files})
    world.queue(job_id)
    worker = Worker(api, served, world.place(job_id))
    with worker.http:
        request = AttemptRequest.from_json(worker.call("GET", "request"))
    assert len(request.launch.blobs) == 8192


def test_token_of_another_attempt_is_refused(worker: Worker, api: Api, served: Served, world: World) -> None:
    other_id = api.submit()
    world.queue(other_id)
    other = Worker(api, served, world.place(other_id))
    with other.http:
        for token in (other.job.live.token, api.key):
            headers = {"Authorization": f"Bearer {token}"}
            assert worker.call("GET", "request", 401, headers=headers)["code"] == "AUTH_TOKEN_INVALID"
    assert api.call("GET", "/v1/worker/attempts/job-none.1/request", 401)["code"] == "AUTH_TOKEN_INVALID"


def test_token_is_no_api_key(worker: Worker, api: Api) -> None:
    headers = {"Authorization": f"Bearer {worker.job.live.token}"}
    for path in ("/v1/jobs", f"/v1/jobs/{worker.job.job_id}", "/v1/events", "/openapi.json"):
        assert api.call("GET", path, 401, headers=headers)["code"] == "AUTH_TOKEN_INVALID"
    assert api.call("PUT", f"/v1/blobs/{'0' * 64}", 401, headers=headers)["code"] == "AUTH_TOKEN_INVALID"


def test_node_is_claimed_once(worker: Worker, world: World) -> None:
    assert worker.call("POST", "claims/0", json=CLAIMANT) == {"granted": True}
    assert worker.call("POST", "claims/0", json=CLAIMANT) == {"granted": True}
    assert worker.call("POST", "claims/0", json={**CLAIMANT, "nonce": "n2"}) == {"granted": False}
    assert worker.call("POST", "claims/1", json={**CLAIMANT, "nonce": "n2", "newer": 1}) == {"granted": True}
    assert worker.call("POST", "claims/2", 404, json=CLAIMANT)
    assert world.directory(worker.job).claimant(0) == CLAIMANT
    assert worker.attempt_id in world.hints


@pytest.mark.parametrize("change", [{"nonce": "../x"}, {"nonce": ""}, {"pid": "x"}, {"pid": -1}, {"boot_id": None}])
def test_bad_claimant_is_refused(worker: Worker, change: dict[str, Any]) -> None:
    assert worker.call("POST", "claims/0", 422, json={**CLAIMANT, **change})["details"][0]["field"] in change


def test_claimant_cannot_pose_as_the_server(worker: Worker, world: World) -> None:
    worker.call("POST", "claims/0", json={**CLAIMANT, "revoked": True})
    assert "revoked" not in (world.directory(worker.job).claimant(0) or {})


def test_stream_grows_by_offset_and_repetition_changes_nothing(worker: Worker, world: World) -> None:
    path = f"streams/{STREAM}"
    assert worker.call("POST", f"{path}?offset=0", content=b"abc") == {"next_offset": 3}
    assert worker.call("POST", f"{path}?offset=0", content=b"abc") == {"next_offset": 3}
    assert worker.call("POST", f"{path}?offset=1", content=b"bcde") == {"next_offset": 5}
    gap = worker.call("POST", f"{path}?offset=9", 409, content=b"x")
    assert (gap["code"], gap["next_offset"]) == ("STREAM_GAP", 5)
    assert gap["details"] == [{"field": "offset", "message": "5"}]
    assert world.directory(worker.job).read(STREAM, 0) == b"abcde"


def test_bytes_sent_many_times_at_once_are_written_once(worker: Worker, world: World) -> None:
    data = b"".join(b"%d\n" % n for n in range(50_000))

    def send(_: int) -> Any:
        return worker.call("POST", f"streams/{STREAM}?offset=0", content=data)

    with ThreadPoolExecutor(8) as pool:
        assert {answer["next_offset"] for answer in pool.map(send, range(16))} == {len(data)}
    assert world.directory(worker.job).read(STREAM, 0) == data


@pytest.mark.parametrize(
    "path",
    [
        "streams/request.json?offset=0",
        "streams/nodes/0/../../../x?offset=0",
        "streams/nodes/2/worker.jsonl?offset=0",
        f"streams/{STREAM}?offset=-1",
        f"streams/{STREAM}",
        f"streams/{STREAM}?offset={'9' * 25}",
    ],
)
def test_impossible_stream_is_refused(worker: Worker, path: str) -> None:
    assert worker.http.build_request("POST", path).url.path  # it is sent as it is written
    assert worker.http.post(path, content=b"x").status_code in {404, 422}


def test_documents_go_up_and_the_rendezvous_comes_down(worker: Worker, world: World) -> None:
    assert worker.call("GET", "documents/nodes/0/rendezvous.json", 404)["code"] == "NOT_FOUND"
    meeting = {"host": "127.0.0.1", "port": 1}
    assert worker.call("PUT", "documents/nodes/0/rendezvous.json", json=meeting) == {}
    assert worker.call("GET", "documents/nodes/0/rendezvous.json") == meeting
    end = {"reason": "SUCCEEDED", "message": "", "ended_at": 1.0, "streams": {}}
    worker.call("PUT", "documents/nodes/1/exit.json", json=end)
    assert world.directory(worker.job).document("nodes/1/exit.json") == end


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("request.json", {}),
        ("control.json", {}),
        ("nodes/7/beat.json", {}),
        ("nodes/0/beat.json", []),
        ("nodes/0/exit.json", {"ended_at": 1.0}),
        ("nodes/0/exit.json", {"reason": "BORED", "ended_at": 1.0}),
    ],
)
def test_impossible_document_is_refused(worker: Worker, path: str, document: Any) -> None:
    assert worker.call("PUT", f"documents/{path}", 422, json=document)["code"] == "VALIDATION_ERROR"


def test_other_files_of_the_run_directory_are_not_shown(worker: Worker) -> None:
    for path in ("request.json", "control.json", "nodes/0/beat.json", "%2e%2e/owner.json"):
        assert worker.http.get(f"documents/{path}").status_code == 404


def test_documents_sent_many_times_at_once_stay_whole(worker: Worker, world: World) -> None:
    def send(n: int) -> Any:
        return worker.call("PUT", "documents/nodes/0/beat.json", json={"t": 1.0, "seq": n})

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(send, range(64))) == [{}] * 64
    assert world.directory(worker.job).document("nodes/0/beat.json") is not None


def test_control_is_null_until_something_is_wanted(worker: Worker, world: World) -> None:
    assert worker.call("GET", "control?after=0&wait_s=0") is None
    wish = {"seq": 4, "stop": "cancel", "save": False, "grace_s": 1.0, "dump_stacks": False}
    world.directory(worker.job).set_control(wish)
    assert worker.call("GET", "control?after=0&wait_s=0") == wish
    assert worker.call("GET", "control?after=4&wait_s=0") is None


def test_control_waits_for_a_wish(worker: Worker, world: World) -> None:
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(worker.call("GET", "control?after=1&wait_s=50")))
    world.directory(worker.job).set_control({"seq": 1})
    waiting.start()
    time.sleep(0.1)  # not for luck: the answer is the same when the wish comes first
    world.directory(worker.job).set_control({"seq": 2, "stop": "pause"})
    waiting.join(PATIENCE_S)
    assert answers == [{"seq": 2, "stop": "pause"}]


def test_only_the_current_attempt_is_the_owner(worker: Worker, world: World) -> None:
    rank = worker.rank_headers
    assert worker.call("GET", "owner", headers=rank) == {"owner": True}
    job_id = worker.job.job_id
    world.see(job_id, {"type": "started"})
    world.end(job_id)
    assert worker.call("GET", "owner", headers=rank) == {"owner": False}


def test_token_of_ranks_is_good_for_the_owner_alone(worker: Worker, api: Api, world: World) -> None:
    rank = worker.rank_headers
    assert worker.job.live.token not in rank["Authorization"]
    end = {"reason": "SUCCEEDED", "message": "", "ended_at": 1.0, "streams": {}}
    for method, path, options in (
        ("GET", "request", {}),
        ("GET", "control", {}),
        ("GET", "documents/nodes/0/rendezvous.json", {}),
        ("POST", "claims/0", {"json": CLAIMANT}),
        ("POST", f"streams/{STREAM}?offset=0", {"content": b"x"}),
        ("PUT", "documents/nodes/0/exit.json", {"json": end}),
    ):
        assert worker.call(method, path, 401, headers=rank, **options)["code"] == "AUTH_TOKEN_INVALID"
    for path in ("/v1/jobs", f"/v1/blobs/{'0' * 64}"):
        assert api.call("GET", path, 401, headers=rank)["code"] == "AUTH_TOKEN_INVALID"
    assert worker.call("GET", "owner", 401)["code"] == "AUTH_TOKEN_INVALID"
    assert world.directory(worker.job).document("nodes/0/exit.json") is None


def test_attempt_that_has_ended_takes_nothing_more(worker: Worker, world: World) -> None:
    worker.call("POST", f"streams/{STREAM}?offset=0", content=b"all")
    end = {"reason": "SUCCEEDED", "message": "", "ended_at": 1.0, "streams": {}}
    for node in (0, 1):
        worker.call("PUT", f"documents/nodes/{node}/exit.json", json=end)
    job_id = worker.job.job_id
    world.see(job_id, {"type": "started"})
    assert world.end(job_id).status == "COMPLETED"
    for method, path, options in (
        ("GET", "request", {}),
        ("GET", "control", {}),
        ("POST", "claims/0", {"json": CLAIMANT}),
        ("POST", f"streams/{STREAM}?offset=3", {"content": b" lies"}),
        ("PUT", "documents/nodes/0/exit.json", {"json": {**end, "reason": "CANCELLED"}}),
    ):
        assert worker.call(method, path, 410, **options)["code"] == "ATTEMPT_ENDED"
    assert world.directory(worker.job).read(STREAM, 0) == b"all"
    assert world.directory(worker.job).document("nodes/0/exit.json") == end


def test_worker_of_a_removed_run_directory_is_sent_away(worker: Worker, world: World) -> None:
    directory = world.directory(worker.job).path
    directory.rename(directory.with_name("gone"))
    assert worker.call("POST", f"streams/{STREAM}?offset=0", 404, content=b"x")
    assert worker.call("PUT", "documents/nodes/0/beat.json", 404, json={})
    assert worker.call("GET", "request", 404)
    assert not directory.exists()


def test_body_over_the_limit_is_refused(worker: Worker) -> None:
    assert worker.call("POST", f"streams/{STREAM}?offset=0", 413, content=b"x" * (9 << 20))


def test_what_a_worker_sends_can_be_followed(worker: Worker, api: Api) -> None:
    with api.stream(f"/v1/jobs/{worker.job.job_id}/logs") as events:
        worker.call("POST", f"streams/{STREAM}?offset=0", content=b"hello\n")
        assert next(events).json()["message"] == "hello"
    assert wait_for(lambda: worker.attempt_id in api.world.hints)
