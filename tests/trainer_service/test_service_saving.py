"""Checkpoints of the service: names, what the server is told, and what others can load."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from running_service import BASE_MODEL, Client, FailedError, RunningService, TestModel, data, running

from trainmaster.jobs.checkpoint import read_manifest, verify
from trainmaster.trainer_service import export_files

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running(tmp_path_factory.mktemp("service"), tiny) as started:
        yield started


@pytest.fixture(scope="module")
def full(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running(tmp_path_factory.mktemp("full"), tiny, mode="full", lora_rank=0) as started:
        yield started


def refused(model: TestModel, op: str, **fields: Any) -> FailedError:
    with pytest.raises(FailedError) as caught:
        model.do(op, fields)
    return caught.value


def place(service: RunningService, kind: str, name: str) -> Path:
    (found,) = (service.checkpoints / kind / name).iterdir()
    return found


def transformers_logprobs(model: Any, seed: int = 0) -> list[list[float]]:
    import torch

    found = []
    for datum in data(seed):
        tokens = torch.tensor(datum["model_input"]["chunks"][0]["tokens"])
        targets = torch.tensor(datum["loss_fn_inputs"]["target_tokens"]["data"])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
        found.append(logprobs.gather(1, targets[:, None])[:, 0].tolist())
    return found


def test_names_belong_to_the_job_at_one_door_and_to_the_model_at_the_other(service: RunningService) -> None:
    ours, theirs = Client(service), Client(service, door="tinker")
    first, second = theirs.create_model(seed=1), theirs.create_model(seed=2)
    paths = [model.save("same") for model in (first, second)]
    assert paths == [f"tinker://{model.model_id}/weights/same" for model in (first, second)]
    assert first.save_for_sampler("same") == f"tinker://{first.model_id}/sampler_weights/same"
    other = ours.create_model(seed=3)
    assert other.save("same") == "same"
    expected = [model.logprobs() for model in (first, second, other)]
    found = []
    for path in (*paths, "same"):
        loaded = Client(service).create_model(seed=9)
        loaded.load(path)
        found.append(loaded.logprobs())
    assert found == expected
    names = service.http.get("/list_checkpoints").json()["checkpoints"]
    assert {*paths, "same"} <= set(names)


def test_name_that_is_taken_is_replaced_only_where_that_is_meant(service: RunningService) -> None:
    model = Client(service, door="tinker").create_model(seed=4)
    path = model.save("taken")
    assert "already" in str(refused(model, "save_weights", path="taken"))
    model.train([0])
    assert model.save("taken", overwrite=True) == path
    assert model.save_for_sampler("taken")
    assert "already" in str(refused(model, "save_weights_for_sampler", path="taken"))
    loaded = Client(service).create_model()
    loaded.load(path)
    assert loaded.logprobs() == model.logprobs()
    (left,) = (service.checkpoints / "weights" / model.model_id / "taken").iterdir()
    assert read_manifest(left).step == 1
    events = [
        event for event in service.events("checkpoint") if event["name"] == "taken" and event["kind"] == "training"
    ]
    assert [event["attributes"].get("replaces") for event in events] == [None, [events[0]["checkpoint_id"]]]
    # The other client says of itself that a second save under a name overwrites.
    fireworks = Client(service).create_model()
    assert [fireworks.save("again"), fireworks.save("again")] == ["again"] * 2


def test_names_that_lead_elsewhere_are_refused(service: RunningService) -> None:
    model = Client(service).create_model()
    for name in ("../up", "a/b", ".hidden", "", "x" * 129, "ünder", 7):
        assert refused(model, "save_weights", path=name).category == "user"
    for path in ("no-such", "tinker://../weights/a", "tinker://a/b/c", "cross_job://other/name", "/etc", None):
        assert refused(model, "load_weights", path=path, optimizer=True).category == "user"
    assert not (service.checkpoints.parent / "up").exists()


def test_states_have_names_that_the_clients_of_their_door_load(service: RunningService) -> None:
    ours, theirs = Client(service).create_model(), Client(service, door="tinker").create_model()
    for name in ("Step_1", "step.1", "step_1", "step-", "x" * 64):
        error = refused(ours, "save_weights", path=name)
        assert error.category == "user"
        assert "up to 63 lower-case letters, digits and '-'" in str(error)
        assert theirs.save(name).endswith(f"/weights/{name}")
        assert ours.save_for_sampler(name) == name  # which is never loaded by its bare name
    for name in ("1", "step-1", "x" * 63):
        ours.load(ours.save(name))
    # What a trainer calls them itself, when it has to stop or is given no name.
    path = ours.do("save_weights", {})["path"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", path)
    ours.load(path)


def test_calibration_is_kept_in_the_checkpoint(service: RunningService) -> None:
    calibration = {"contract": "systemone-letter-v1", "temperature": {"choice": 1.5}}
    model = Client(service).create_model()
    model.save_for_sampler("calibrated", metadata={"decision_calibration": calibration})
    model.save_for_sampler("uncalibrated", metadata={"decision_calibration": None})
    assert json.loads((place(service, "sampler", "calibrated") / "decision.json").read_text()) == calibration
    assert not (place(service, "sampler", "uncalibrated") / "decision.json").exists()
    verify(place(service, "sampler", "calibrated"))
    for metadata, why in (
        (7, "metadata: an object"),
        ({"note": "x"}, "not 'note'"),
        ({"decision_calibration": "hot"}, "decision_calibration: an object"),
        ({"decision_calibration": {"x": "y" * 40_000}}, "metadata: an object of at most 32 KiB"),
    ):
        error = refused(model, "save_weights_for_sampler", path="none", metadata=metadata)
        assert (error.category, why in str(error)) == ("user", True)


def test_server_is_told_kind_name_and_attributes(service: RunningService) -> None:
    client = Client(service, door="tinker")
    model = client.create_model(rank=4, user_metadata={"run": "mine"}, lora_config={"train_unembed": False})
    model.train([0, 1])
    before = time.time()
    model.save("told", ttl_seconds=3600, user_metadata={"note": "half"})
    model.save_for_sampler("told")
    training, sampler = (event for event in service.events("checkpoint") if event["name"] == "told")
    expires_at = training["attributes"].pop("expires_at")
    assert before + 3600 <= expires_at <= time.time() + 3600
    common = {
        "model_id": model.model_id,
        "session_id": client.session_id,
        "door": "tinker",
        "base_model": BASE_MODEL,
        "is_lora": True,
        "lora_rank": 4,
        "lora_alpha": 32.0,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }
    assert training["attributes"] == {**common, "user_metadata": {"note": "half"}}
    assert sampler["attributes"] == {**common, "user_metadata": {"run": "mine"}, "sampler_kind": "base"}
    assert [(event["kind"], event["step"]) for event in (training, sampler)] == [("training", 2), ("sampler", 2)]
    for event in (training, sampler):
        manifest = verify(event["path"])
        assert (manifest.name, manifest.kind) == ("told", event["kind"])
    for fields in ({"ttl_seconds": 3599}, {"ttl_seconds": "soon"}, {"user_metadata": {"much": "x" * 100_000}}):
        assert refused(model, "save_weights", path="untold", **fields).category == "user"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapter_and_merged_weights_are_what_peft_and_transformers_load(service: RunningService, tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = Client(service).create_model(seed=6)
    assert "base model" in str(refused(model, "save_weights_for_sampler", path="early", checkpoint_type="merged_base"))
    model.train(range(3))
    assert model.save_for_sampler("adapter", checkpoint_type="base") == "adapter"
    assert model.save_for_sampler("whole", checkpoint_type="merged_base") == "whole"
    kinds = {event["name"]: event["attributes"].get("sampler_kind") for event in service.events("checkpoint")}
    assert (kinds["adapter"], kinds["whole"]) == ("base", "merged")
    trained = np.array(model.logprobs())
    base = AutoModelForCausalLM.from_pretrained(tiny)
    assert np.abs(np.array(transformers_logprobs(base)) - trained).max() > 1e-2
    adapted = PeftModel.from_pretrained(base, place(service, "sampler", "adapter"))
    assert np.array(transformers_logprobs(adapted)) == pytest.approx(trained, abs=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(place(service, "sampler", "whole"))
    assert np.array(transformers_logprobs(merged)) == pytest.approx(trained, abs=1e-4)
    for fields in ({"checkpoint_type": "best"}, {"checkpoint_type": "merged_base", "export_precision": "nvfp4"}):
        assert refused(model, "save_weights_for_sampler", path="none", **fields).category == "user"


def test_samples_from_a_checkpoint_are_those_of_the_model_that_was_saved(service: RunningService) -> None:
    client = Client(service)
    model = client.create_model(seed=7)
    model.train(range(3))
    model.save("to-train")
    model.save_for_sampler("to-sample")
    model.save_for_sampler("to-sample-merged", checkpoint_type="merged_base")
    live = model.do("save_weights_for_sampler", {"sampling_session_seq_id": 70})["sampling_session_id"]
    expected = client.result(client.sample(live, 0, PROMPT, max_tokens=10))
    assert client.result(client.sample(client.sampler(base_model=BASE_MODEL), 0, PROMPT, max_tokens=10)) != expected
    for path in ("to-sample", "tinker://x/weights/to-train"):
        source = str(place(service, "weights", "to-train")) if path.startswith("tinker") else ""
        session = client.sampler(model_path=path, source=source)
        assert client.result(client.sample(session, 0, PROMPT, max_tokens=10)) == expected
    tinker = Client(service, door="tinker")
    named = tinker.create_model()
    named.load("to-train")
    session = tinker.sampler(model_path=named.save_for_sampler("by-uri"))
    assert tinker.result(tinker.sample(session, 0, PROMPT, max_tokens=10)) == expected
    merged = client.result(client.sample(client.sampler(model_path="to-sample-merged"), 0, PROMPT, max_tokens=10))
    assert merged["sequences"][0]["tokens"] == expected["sequences"][0]["tokens"]


def test_adapter_that_was_saved_for_sampling_can_be_trained_on(service: RunningService) -> None:
    client = Client(service)
    model = client.create_model(seed=8)
    model.train(range(2))
    model.save_for_sampler("an-adapter")
    begun = client.create_model(seed=1)
    answer = begun.do("load_adapter", {"adapter_path": "an-adapter"})
    assert answer == {"model_id": begun.model_id, "adapter_path": "an-adapter", "type": "load_adapter"}
    assert begun.logprobs() == model.logprobs()
    source = str(place(service, "sampler", "an-adapter"))
    with pytest.raises(FailedError, match="without an optimizer"):
        begun.load("x", source=source)
    begun.load("x", optimizer=False, source=source)
    assert begun.train([3])


def test_state_of_another_kind_of_model_is_refused_and_changes_nothing(
    service: RunningService, full: RunningService, tiny: Path, tmp_path: Path
) -> None:
    saved = Client(service).create_model(rank=4)
    saved.save("of-rank-4")
    model = Client(service).create_model(rank=2, seed=3)
    before = model.logprobs()
    assert "rank" in str(refused(model, "load_weights", path="of-rank-4", optimizer=True))
    assert model.logprobs() == before
    source = str(place(service, "weights", "of-rank-4"))
    with pytest.raises(FailedError, match="adapter"):
        Client(full).create_model(rank=0).load("x", source=source)
    with running(tmp_path, tiny, base_model="another/model") as other:
        stranger = Client(other)
        fresh = stranger.create_model(rank=None, base_model="another/model", lora_config={"rank": 4})
        with pytest.raises(FailedError, match=BASE_MODEL):
            fresh.load("x", source=source)


def test_damaged_checkpoint_is_told_and_not_loaded(service: RunningService) -> None:
    model = Client(service).create_model(seed=2)
    model.train([0])
    model.save("damaged")
    model.save_for_sampler("damaged")
    for kind, pattern in (("weights", "arrays-*.safetensors"), ("sampler", "adapter_model.safetensors")):
        (path,) = place(service, kind, "damaged").glob(pattern)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    before = model.logprobs()
    error = refused(model, "load_weights", path="damaged", optimizer=True)
    assert (error.category, "damaged" in str(error)) == ("server", True)
    assert refused(model, "load_adapter", adapter_path="damaged").category == "server"
    assert model.logprobs() == before
    assert model.train([1])


def test_full_weights_are_saved_whole_and_then_as_deltas(full: RunningService) -> None:
    from transformers import AutoModelForCausalLM

    client = Client(full)
    model = client.create_model(rank=0)
    assert "base" in str(refused(model, "save_weights_for_sampler", path="d0", checkpoint_type="delta"))
    first = model.train(range(2))
    assert first[0] == pytest.approx(client.create_model(rank=0).loss(0))
    model.save_for_sampler("b1", checkpoint_type="base")
    model.save("state")
    model.loss(5)
    model.step(1e-6)
    model.save_for_sampler("d1", checkpoint_type="delta")
    trained = model.logprobs()
    live = model.do("save_weights_for_sampler", {"sampling_session_seq_id": 70})["sampling_session_id"]
    expected = client.result(client.sample(live, 0, PROMPT, max_tokens=10))
    session = client.sampler(model_path="d1")
    assert client.result(client.sample(session, 0, PROMPT, max_tokens=10)) == expected
    attributes = {event["name"]: event["attributes"] for event in full.events("checkpoint")}
    assert [attributes[name]["sampler_kind"] for name in ("b1", "d1")] == ["base", "delta"]
    assert attributes["d1"]["base_checkpoint"] == verify(place(full, "sampler", "b1")).checkpoint_id
    sizes = [verify(place(full, "sampler", name)).size_bytes for name in ("b1", "d1")]
    assert sizes[1] < sizes[0] / 2
    whole = AutoModelForCausalLM.from_pretrained(place(full, "sampler", "b1"))
    resumed = client.create_model(rank=0)
    resumed.load("state")
    assert np.array(transformers_logprobs(whole)) == pytest.approx(np.array(resumed.logprobs()), abs=1e-4)
    resumed.load("d1", optimizer=False, source=str(place(full, "sampler", "d1")))
    assert resumed.logprobs() == trained


def test_resumed_full_training_gives_the_same_losses(full: RunningService) -> None:
    client = Client(full)
    model = client.create_model(rank=0)
    model.train(range(2))
    model.save("two-steps")
    expected = model.train(range(2, 4))
    resumed = client.create_model(rank=0)
    resumed.load("two-steps")
    assert resumed.train(range(2, 4)) == expected


def test_delta_makes_the_whole_again_and_notices_another_base(tmp_path: Path) -> None:
    whole, base, delta, made = (tmp_path / name for name in ("whole", "base", "delta", "made"))
    for directory in (whole / "inner", base / "inner", delta):
        directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, 20 << 20, dtype=np.uint8)
    (base / "weights").write_bytes(weights.tobytes())
    weights[::100_000] ^= 1
    (whole / "weights").write_bytes(weights.tobytes())
    for directory in (base, whole):
        (directory / "config.json").write_text(json.dumps({"same": True}))
    (base / "inner" / "longer").write_bytes(b"0123456789")
    (whole / "inner" / "longer").write_bytes(b"0123")
    (whole / "new").write_bytes(b"new")
    export_files.write_delta(whole, base, delta, of={"name": "b"})
    assert export_files.base_of_delta(delta) == {"name": "b"}
    assert sum(path.stat().st_size for path in delta.rglob("*") if path.is_file()) < 20_000
    made.mkdir()
    export_files.apply_delta(delta, base, made)
    for path in whole.rglob("*"):
        assert path.is_dir() or path.read_bytes() == (made / path.relative_to(whole)).read_bytes()
    (base / "weights").write_bytes(weights.tobytes())
    with pytest.raises(export_files.DeltaError, match="not the base"):
        export_files.apply_delta(delta, base, made)
    (base / "weights").unlink()
    with pytest.raises(export_files.DeltaError):
        export_files.apply_delta(delta, base, made)
    with pytest.raises(export_files.DeltaError, match="no delta"):
        export_files.base_of_delta(base)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_external_weights_are_a_peft_adapter_by_the_names_of_tinkers_tools(
    service: RunningService, tiny: Path, tmp_path: Path
) -> None:
    """The model is tied: its unembedding has a name of its own there, which PEFT maps."""
    import peft
    import transformers

    model = Client(service, door="tinker").create_model()
    model.train([0, 1])
    saved = model.do("save_weights_external", {"path": "out", "ttl_seconds": 3600})
    assert saved["path"] == f"tinker://{model.model_id}/external_weights/out"
    directory = place(service, f"external/{model.model_id}", "out")
    names = set(safetensors.torch.load_file(directory / "adapter_model.safetensors"))
    assert not [name for name in names if "lm_head" in name]
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    mapped = peft.PeftModel.from_pretrained(base, directory, key_mapping={r"model\.unembed_tokens": "lm_head"})
    found = model.client.result(model.ask_forward_backward(0))["loss_fn_outputs"]
    for row, expected in zip(transformers_logprobs(mapped), found, strict=True):
        assert row == pytest.approx(expected["logprobs"]["data"], abs=1e-4)
    # It is read back as it was written.
    other = Client(service, door="tinker").create_model()
    other.do("load_weights", {"path": saved["path"]}, **{"X-Trainmaster-Source": str(directory)})
    again = other.client.result(other.ask_forward_backward(0))["loss_fn_outputs"]
    assert [each["logprobs"] for each in again] == [each["logprobs"] for each in found]


def test_external_weights_of_a_full_model_are_a_transformers_checkpoint(full: RunningService) -> None:
    import transformers

    model = Client(full, door="tinker").create_model(rank=None)
    model.train([0])
    model.do("save_weights_external", {"path": "whole"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place(full, f"external/{model.model_id}", "whole"))
    found = model.client.result(model.ask_forward_backward(0))["loss_fn_outputs"]
    for row, expected in zip(transformers_logprobs(loaded), found, strict=True):
        assert row == pytest.approx(expected["logprobs"]["data"], abs=1e-4)


def test_recipients_that_are_no_native_age_keys_are_refused_by_name(service: RunningService) -> None:
    model = Client(service, door="tinker").create_model()
    for wrong in ("ssh-ed25519 AAAA", "age1qqqq", "", 7):
        error = refused(model, "save_weights_external", path="x", age_encryption_recipients=[wrong])
        assert (error.category, "age_encryption_recipients" in str(error)) == ("user", True)
    for many in ([], ["age1"] * 11, "age1"):
        assert "1 to 10" in str(refused(model, "save_weights_external", path="x", age_encryption_recipients=many))
