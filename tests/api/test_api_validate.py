"""Asking whether a job would be accepted: refused as a submission is, and nothing is kept."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from api_world import COMMAND, Api, World

DATA = b"print(1)\n"
DIGEST = hashlib.sha256(DATA).hexdigest()
OTHER = "0" * 64


def script(*digests: str) -> dict[str, Any]:
    files = [{"path": f"{index}.py", "sha256": digest} for index, digest in enumerate(digests)]
    return {"name": "n", "workload": {"kind": "script", "path": "0.py", "files": files}}


def validate(api: Api, document: dict[str, Any], expect: int = 200, **options: Any) -> Any:
    return api.call("POST", "/v1/jobs/validate", expect, json=document, **options)


def test_job_that_would_be_accepted_is_not_submitted(api: Api) -> None:
    assert validate(api, {**COMMAND, "handle": "mine"}) == {"missing_blobs": [], "rendered": None}
    assert api.call("GET", "/v1/jobs")["total_count"] == 0
    assert api.call("POST", "/v1/jobs", 201, json={**COMMAND, "handle": "mine"})["handle"] == "mine"


def test_files_that_have_to_be_uploaded_are_told(api: Api, world: World) -> None:
    assert validate(api, script(DIGEST, OTHER)) == {"missing_blobs": [OTHER, DIGEST], "rendered": None}
    api.call("PUT", f"/v1/blobs/{DIGEST}", 201, content=DATA)
    assert validate(api, script(DIGEST, OTHER)) == {"missing_blobs": [OTHER], "rendered": None}
    other_account = {"Authorization": f"Bearer {world.key('validates-too')}"}
    assert validate(api, script(DIGEST), headers=other_account) == {"missing_blobs": [DIGEST], "rendered": None}
    world.roots.path("blobs", f"{api.account_id}/{DIGEST}").unlink()
    assert validate(api, script(DIGEST)) == {"missing_blobs": [DIGEST], "rendered": None}


@pytest.mark.parametrize(
    ("document", "status", "says"),
    [
        ({**COMMAND, "nmae": "n"}, 422, "did you mean 'name'"),
        ({**COMMAND, "backend": "slurm"}, 400, "is not available on this server"),
        ({**COMMAND, "scheduling_config": {"queue": "absent"}}, 422, "there is no queue 'absent'"),
        ({**COMMAND, "handle": "taken"}, 409, "another job has the handle taken"),
        (
            {
                "name": "n",
                "training_config": {
                    "training_type": "SFT",
                    "base_model": {"model_id": "org/model"},
                    "resume_from_checkpoint": "absent",
                },
                "data_config": {"sources": [{"path": "hf://org/rows"}]},
            },
            422,
            "there is no committed checkpoint 'absent'",
        ),
    ],
)
def test_what_a_submission_refuses_is_refused_alike(api: Api, document: dict[str, Any], status: int, says: str) -> None:
    api.submit(handle="taken")
    asked = validate(api, document, status)
    submitted = api.call("POST", "/v1/jobs", status, json=document)
    assert says in asked["message"]
    assert asked == submitted


def test_malformed_token_is_refused(api: Api) -> None:
    assert "X-ScaiDrive-Token" in validate(api, COMMAND, 422, headers={"X-ScaiDrive-Token": "a b"})["message"]
