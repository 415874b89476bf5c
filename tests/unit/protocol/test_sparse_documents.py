"""Documents without the fields that have their defaults."""

import json
from types import MappingProxyType

from trainmaster.protocol.documents import dump_sparse, from_json
from trainmaster.protocol.launch import BlobFile, Launch, LaunchStep, Lifetime, Readiness


def test_a_launch_is_the_same_after_it_was_stored_without_its_defaults() -> None:
    launch = Launch(
        kind="script",
        steps=(
            LaunchStep(name="environment", argv=("uv", "sync"), timeout_s=5.0),
            LaunchStep(name="main", argv=("train.py", "--lr", "1e-4"), python=True),
        ),
        environment=MappingProxyType({"EMPTY": "", "A": "b"}),
        blobs=(BlobFile(sha256="0" * 64, path="train.py", executable=True),),
        lifetime=Lifetime.SERVICE,
        readiness=Readiness(),
        retry_exit_codes=(3, 4),
    )
    assert from_json(Launch, json.loads(dump_sparse(launch))) == launch


def test_only_fields_that_differ_from_their_defaults_are_written() -> None:
    step = LaunchStep(name="main", argv=("true",))
    assert json.loads(dump_sparse(step)) == {"name": "main", "argv": ["true"]}
