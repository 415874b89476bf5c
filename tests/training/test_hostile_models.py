"""Models, tokenizers and templates that mean harm: nothing of them is run, and nothing else is read for them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import Make

from data_tokenizer import make_tokenizer
from trainmaster.server.core.spec.data import PreprocessConfig
from trainmaster.server.core.training.options import REFUSED
from trainmaster.training.data.encoder import Encoder, load_tokenizer
from trainmaster.training.document import TokenizationConfig
from trainmaster.training.steps import InputError, Origin, RowError


class _Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What there is once foreign code was run."""
    return tmp_path / "was-run"


@pytest.fixture
def hostile(tiny: Path, tmp_path: Path) -> Path:
    """A copy of a good model, to be spoilt."""
    return Path(shutil.copytree(tiny / "model", tmp_path / "hostile"))


def preprocess(**options: Any) -> PreprocessConfig:
    return PreprocessConfig(**options)


def spoilt(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_pickled_weights_are_not_loaded(make_job: Make, hostile: Path, marker: Path) -> None:
    (hostile / "model.safetensors").unlink()
    (hostile / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(marker)))
    job = make_job()
    job.prepared["model_path"] = str(hostile)
    job.start()
    assert job.finish() == [1]
    assert "model.safetensors" in job.log()
    assert not marker.exists()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_run_only_where_it_is_trusted(
    make_job: Make, hostile: Path, marker: Path, part: str, trusted: bool
) -> None:
    (hostile / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    spoilt(hostile / part, auto_map=classes, model_type="evil", tokenizer_class="Evil")
    job = make_job(base_model={"trust_remote_code": trusted})
    job.prepared |= {"model_path": str(hostile), "tokenizer_path": str(hostile)}
    job.start(HF_HOME=str(marker.parent / "hf"))
    job.finish()
    assert marker.exists() == trusted


@pytest.mark.parametrize("name", [*REFUSED, "_attn_implementation", "vocab_file"])
def test_option_of_a_tokenizer_that_would_read_or_run_something_else_is_refused(tmp_path: Path, name: str) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"^preprocess\.tokenizer_config\.{name}: "):
        load_tokenizer(tmp_path, preprocess(tokenizer_config={name: "true"}))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
        "{% set _ = messages.clear() %}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_chat_template_reaches_nothing_but_the_messages(tmp_path: Path, template: str) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    document = {
        "training_config": {"training_type": "SFT", "hyperparameters": {"assistant_only_loss": False}},
        "data_config": {"sources": [{"path": "rows.jsonl"}], "preprocess": {"chat_template": template}},
    }
    config = TokenizationConfig.from_document(document)
    tokenizer = load_tokenizer(tmp_path, config.data.preprocess)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(RowError, match="the chat template refuses it"):
        Encoder(config, tokenizer, 64).encode([row], [Origin(source="s", file="s", number=1)])
