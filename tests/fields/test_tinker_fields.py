"""Every field of tinker's requests that says what is to be done has an effect, or is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from field_tables import Field, broken_reference, fields_of

from spec_documents import changed
from trainmaster.engine.types import EngineError
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors.tinker.wire import CreateSession, SearchSessions, SetTtl
from trainmaster.trainer_service.models import adam_options, lora_options
from trainmaster.trainer_service.wire import decode_pass, decode_sample

REFUSED = "refused"
FIELDS = fields_of("tinker")
ROOT = Path(__file__).parents[2]
ADDRESSES = {
    *("sampling_params", "lora_config", "type"),
    *("session_id", "model_id", "model_seq_id", "sampling_session_id", "sampling_session_seq_id", "seq_id"),
}
"""Fields that are an object of their own, or say which model or session a request is of."""
CLASSES = {
    "asample": "SampleRequest",
    "asample, sampling_params": "SamplingParams",
    "optim_step, adam_params": "AdamParams",
    "create_model, lora_config": "LoraConfig",
    "create_session": "CreateSessionRequest",
    "sessions/search": "SessionSearchRequest",
    "forward_backward, forward_backward_input": "ForwardBackwardInput",
    "create_model": "CreateModelRequest",
    "create_sampling_session": "CreateSamplingSessionRequest",
    "save_weights": "SaveWeightsRequest",
    "save_weights_for_sampler": "SaveWeightsForSamplerRequest",
    "save_weights_external": "SaveWeightsExternalRequest",
    "load_weights": "LoadWeightsRequest",
}
"""Part -> what the latest client calls it."""
KEPT = {"sessions/search": {"session_id"}}
"""Where such a field is what is asked for."""
REFLECT = """
import dataclasses, importlib, inspect, json, pkgutil, sys, tinker.types
found = {}
for module in pkgutil.walk_packages(tinker.types.__path__, "tinker.types."):
    for name, each in vars(importlib.import_module(module.name)).items():
        if inspect.isclass(each) and name in sys.argv[1:]:
            fields = getattr(each, "model_fields", None) or [field.name for field in dataclasses.fields(each)]
            found[name] = list(fields)
print(json.dumps(found))
"""
BASES: dict[str, dict[str, Any]] = {
    "sample": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {}},
    "step": {"adam_params": {}},
    "model": {"lora_config": {"rank": 8}},
    "session": {},
    "ttl": {},
    "search": {},
    "pass": {
        "model_id": "m",
        "forward_backward_input": {
            "data": [{"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": {}}],
            "loss_fn": "cross_entropy",
        },
    },
}


def outcome(base: str, document: dict[str, Any]) -> Any:
    """What is made of a request; `REFUSED` where that is what happens."""
    made = {
        "sample": lambda: decode_sample("it", json.dumps(document).encode()),
        "step": lambda: adam_options(document, learning_rate=None),
        "model": lambda: lora_options(document["lora_config"], rank=document["lora_config"]["rank"]),
        "session": lambda: parse(CreateSession, document),
        "ttl": lambda: parse(SetTtl, document),
        "search": lambda: parse(SearchSessions, document),
        "pass": lambda: _pass(json.dumps(document).encode()),
    }
    try:
        return made[base]()
    except (EngineError, SpecError):
        return REFUSED


def _pass(body: bytes) -> Any:
    made = decode_pass(body, "application/json")
    return made.loss, made.options, [datum.tokens.tolist() for datum in made.data]


def test_table_has_a_row_for_every_field_that_the_latest_client_sends() -> None:
    python = ROOT / ".venvs" / "tinker" / "bin" / "python"
    done = subprocess.run([python, "-c", REFLECT, *CLASSES.values()], check=True, capture_output=True, text=True)
    sent = json.loads(done.stdout)
    for part, name in CLASSES.items():
        wanted = set(sent[name]) - ADDRESSES | KEPT.get(part, set())
        assert {field.name for field in FIELDS if field.part == part} == wanted, part


@pytest.mark.parametrize("field", [field for field in FIELDS if field.base], ids=str)
def test_field_that_is_changed_changes_what_is_made_of_the_request(field: Field) -> None:
    before = outcome(field.base, BASES[field.base])
    after = outcome(field.base, changed(BASES[field.base], field.path, field.value))
    assert before is not REFUSED
    assert after != before
    assert (after is REFUSED) == (field.effect == REFUSED)


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_names_a_test_that_is_there(field: Field) -> None:
    assert broken_reference(field) is None
