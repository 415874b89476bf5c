"""Records that are written as JSON and read again."""

import json
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from trainmaster.protocol.documents import fields_of, from_json, read_document, write_document
from trainmaster.protocol.launch import BlobFile, ContainerLimits, Gang, Launch, LaunchStep, Lifetime, Readiness

GANG = Gang(count=2, argv=("serve",), size=ContainerLimits(cpu_cores=0.5), head=ContainerLimits())
LAUNCH = Launch(
    kind="script",
    steps=(
        LaunchStep(name="environment", argv=("uv", "sync"), timeout_s=5.0, image="tools", gang=GANG),
        LaunchStep(name="main", argv=("train.py", "--lr", "1e-4"), python=True),
    ),
    environment={"EMPTY": "", "A": "b"},
    blobs=(BlobFile(sha256="0" * 64, path="train.py", executable=True),),
    lifetime=Lifetime.SERVICE,
    readiness=Readiness(),
    retry_exit_codes=(3, 4),
)


def test_document_of_the_fields_of_a_record_is_the_one_of_its_plain_form(tmp_path: Path) -> None:
    write_document(tmp_path / "launch.json", fields_of(LAUNCH))
    assert read_document(tmp_path / "launch.json") == json.loads(json.dumps(asdict(LAUNCH)))


def test_record_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    write_document(tmp_path / "launch.json", fields_of(LAUNCH))
    again = from_json(Launch, read_document(tmp_path / "launch.json") or {})
    assert again == LAUNCH
    assert isinstance(again.lifetime, Lifetime)
    assert isinstance(again.steps, tuple)


def test_mapping_that_is_no_dict_is_written_as_one(tmp_path: Path) -> None:
    step = LaunchStep(name="main", argv=(), environment=MappingProxyType({"A": "b"}))
    write_document(tmp_path / "step.json", fields_of(step))
    assert (read_document(tmp_path / "step.json") or {})["environment"] == {"A": "b"}


def test_reader_takes_defaults_for_what_is_missing_and_ignores_what_it_does_not_know() -> None:
    assert from_json(LaunchStep, {"name": "main", "argv": ["true"], "later": 1}) == LaunchStep(
        name="main", argv=("true",)
    )
