"""Rows as tokens: every shape, masks against ones made by hand, templates, beginnings and ends, and whole builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_tokenizer import FORGETFUL, GENERATION, PLAIN, WITH_TOOLS, make_tokenizer, shown
from trainmaster.training.data.dataset import IGNORED, Built, build
from trainmaster.training.data.encoder import Encoder, load_tokenizer, sample_length
from trainmaster.training.data_check import previews
from trainmaster.training.document import LocalSource, TokenizationConfig
from trainmaster.training.steps import InputError, Origin, RowError

ORIGIN = Origin(source="data.jsonl", file="data.jsonl", number=7, unit="line")
CHAT = {
    "messages": [
        {"role": "system", "content": "Sy"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "äh"},
        {"role": "assistant", "content": "ok"},
    ]
}


def document(
    training_type: str = "SFT", *, hyperparameters: dict[str, Any] | None = None, **data: Any
) -> dict[str, Any]:
    return {
        "training_config": {"training_type": training_type, "hyperparameters": hyperparameters or {}},
        "data_config": {"sources": [{"path": "data.jsonl"}], **data},
    }


def encoded(
    row: dict[str, Any],
    tokenizer: Any = None,
    *,
    kind: str = "SFT",
    length: int = 200,
    parameters: Any = None,
    **preprocess: Any,
) -> list[str]:
    """The samples of a row, with what is trained on in brackets."""
    tokenizer = tokenizer or make_tokenizer()
    config = TokenizationConfig.from_document(document(kind, hyperparameters=parameters, preprocess=preprocess))
    samples = Encoder(config, tokenizer, length).encode([row], [ORIGIN])[0]
    return [shown(tokenizer, sample.input_ids, sample.mask) for sample in samples]


def test_conversation_trains_on_what_the_assistant_says() -> None:
    text = "<|system|>Sy<|end|><|user|>hi<|end|><|assistant|>[yo<|end|>]<|user|>äh<|end|><|assistant|>[ok<|end|>]"
    assert encoded(CHAT) == [text]


def test_template_without_marks_gives_the_same_mask() -> None:
    assert encoded(CHAT, make_tokenizer(PLAIN)) == encoded(CHAT, make_tokenizer(GENERATION))


def test_template_that_rewrites_earlier_messages_needs_marks() -> None:
    with pytest.raises(InputError, match=r"has no \{% generation %\} and writes earlier messages differently"):
        encoded(CHAT, make_tokenizer(FORGETFUL))
    everything = encoded(CHAT, make_tokenizer(FORGETFUL), parameters={"assistant_only_loss": False})
    assert everything == [
        "[<|system|>…<|end|><|user|>…<|end|><|assistant|>…<|end|><|user|>…<|end|><|assistant|>ok<|end|>]"
    ]


def test_well_known_template_without_marks_is_replaced_by_trls_marked_one() -> None:
    import trl

    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer = make_tokenizer((templates / "qwen3.jinja").read_text())
    (text,) = encoded(CHAT, tokenizer)
    assert text.count("[") == 2
    assert "yo" in text.partition("[")[2].partition("]")[0]
    assert "ok" in text.rpartition("[")[2]


def test_full_finetuning_trains_on_everything_unless_told_otherwise() -> None:
    whole = "[<|user|>a<|end|><|assistant|>b<|end|>]"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert encoded(row, kind="FULL_FINETUNE") == [whole]
    assert encoded(row, parameters={"assistant_only_loss": False}) == [whole]
    masked = encoded(row, kind="FULL_FINETUNE", parameters={"assistant_only_loss": True})
    assert masked == ["<|user|>a<|end|><|assistant|>[b<|end|>]"]


def test_prompt_with_completion_trains_on_the_completion_and_its_end() -> None:
    row = {"prompt": "2+2=", "completion": "4ü"}
    assert encoded(row) == ["2+2=[4ü</s>]"]
    assert encoded(row, parameters={"completion_only_loss": False}) == ["[2+2=4ü</s>]"]
    assert encoded({"prompt": "", "completion": "4"}) == ["[4</s>]"]


def test_token_with_a_character_of_the_completion_is_trained_on() -> None:
    tokenizer = make_tokenizer(merges=(("=", "4"), ("o", "<")))
    assert encoded({"prompt": "2+2=", "completion": "4"}, tokenizer) == ["2+2[=4</s>]"]
    row = {"messages": [{"role": "assistant", "content": "yo"}, {"role": "user", "content": "<b"}]}
    assert encoded(row, make_tokenizer(GENERATION.replace("<|end|>", ""), merges=(("o", "<"),))) == [
        "<|assistant|>[yo]<|user|><b"
    ]


def test_prompt_and_completion_of_messages_train_on_the_completion() -> None:
    row = {
        "prompt": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "completion": [{"role": "assistant", "content": "d"}],
    }
    begins = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert encoded(row) == [f"{begins}[d<|end|>]"]
    both_off = {"completion_only_loss": False, "assistant_only_loss": False}
    assert encoded(row, parameters=both_off) == [f"[{begins}d<|end|>]"]
    assert encoded(row, parameters={"assistant_only_loss": False}) == [f"{begins}[d<|end|>]"]


def test_text_trains_on_all_of_it() -> None:
    assert encoded({"text": "Once"}) == ["[Once</s>]"]
    assert encoded({"text": "Once"}, kind="CONTINUED_PRETRAIN") == ["[Once</s>]"]


def test_pretraining_reads_text_alone() -> None:
    with pytest.raises(RowError, match=r"data\.jsonl, line 7: has no `text`, which this training type needs"):
        encoded(CHAT, kind="CONTINUED_PRETRAIN")
    both = {"messages": [{"role": "user", "content": "a"}], "text": "b"}
    assert encoded(both, kind="CONTINUED_PRETRAIN") == ["[b</s>]"]


def test_first_shape_of_several_counts() -> None:
    row = {"text": "t", "prompt": "p", "completion": "c"}
    assert encoded(row) == ["p[c</s>]"]
    assert encoded({**row, **CHAT}) == encoded(CHAT)
    assert encoded({**row, "prompt": None}) == ["[t</s>]"]


def test_field_mapping_names_the_columns() -> None:
    mapping = {"prompt": "question", "completion": "answer.text"}
    assert encoded({"question": "q", "answer": {"text": "a"}}, field_mapping=mapping) == ["q[a</s>]"]
    assert encoded({"prompt": "p", "completion": "c"}, field_mapping=mapping) == ["p[c</s>]"]
    with pytest.raises(RowError, match=r"has no column 'answer.text' for completion, which field_mapping names"):
        encoded({"question": "q"}, field_mapping=mapping)


def test_field_mapping_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(InputError, match=r"field_mapping\.q: unknown field 'q'.*the other way round, prompt: q"):
        encoded({"q": "1+1", "a": "2"}, field_mapping={"q": "prompt", "a": "completion"})


def test_messages_as_json_text_are_read() -> None:
    assert encoded({"messages": json.dumps(CHAT["messages"])}) == encoded(CHAT)


def test_tools_and_tool_calls_reach_the_template() -> None:
    row = {
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
        "messages": [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}, "id": None}]},
            {"role": "tool", "content": "2", "tool_calls": None},
        ],
    }
    (text,) = encoded(row, make_tokenizer(WITH_TOOLS), parameters={"assistant_only_loss": False})
    assert text == "[[add]<|user|>1+1<|end|><|assistant|>!add<|end|><|tool|>2<|end|>]"


def test_arguments_of_a_row_reach_the_template() -> None:
    tokenizer = make_tokenizer("{{ mood }}:" + GENERATION)
    row = {**CHAT, "chat_template_kwargs": {"mood": "gay"}}
    assert encoded(row, tokenizer)[0].startswith("gay:<|system|>")


def test_text_parts_of_a_message_are_passed_on_and_images_refused() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    row = {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "hi"}]}]}
    assert encoded(row, tokenizer, parameters={"assistant_only_loss": False}) == ["[hi]"]
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(RowError, match="message 1 holds image; only text can be trained on"):
        encoded(image)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"a": 1},
            "has no `messages`, no `prompt` with `completion` and no `text`; its columns are a; name the column",
        ),
        ({"prompt": "p"}, "its columns are prompt"),
        ({"prompt": "p", "completion": None}, "has nothing in 'completion'; fill it in, or leave such rows out"),
        ({"messages": "hi"}, "column 'messages': is text; expected a list of messages with role and content"),
        ({"messages": []}, "column 'messages': is an empty list"),
        ({"messages": ["hi"]}, "column 'messages': message 1 is text; expected an object with role and content"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 1 has no role, but from, value; expected role"),
        ({"messages": [{"role": "user"}]}, r"message 1 \(user\) has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: its content is a number; expected text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no message of the assistant.*assistant_only_loss"),
        ({"prompt": 3, "completion": "a"}, "column 'prompt': is a number; expected text, or a list of messages"),
        ({"prompt": "a", "completion": " "}, "column 'completion': is empty; leave such rows out with a filter"),
        ({"prompt": "a", "completion": []}, "expected both as text, or both as messages"),
        ({"text": ["a"]}, "column 'text': is a list; expected text"),
        ({"text": ""}, "column 'text': is empty"),
        ({**CHAT, "tools": 3}, "column 'tools': is a number; expected a list of objects"),
        ({**CHAT, "chat_template_kwargs": [3]}, "column 'chat_template_kwargs': is a list; expected an object"),
    ],
)
def test_wrong_row_is_an_error_that_names_row_column_and_remedy(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=f"(?s)^data.jsonl, line 7.*{message}"):
        encoded(row)


def test_template_that_refuses_a_row_is_an_error_of_the_row() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowError, match="line 7, column 'messages': the chat template refuses it: roles must alternate"):
        encoded(CHAT, tokenizer)


def test_conversation_without_a_template_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        InputError, match=r"the tokenizer has no chat template; give one with preprocess\.chat_template"
    ):
        encoded(CHAT, make_tokenizer(None))


@pytest.mark.parametrize(
    ("tokenizer", "preprocess", "text", "chat"),
    [
        ({}, {}, "[a</s>]", "<|assistant|>[b<|end|>]"),
        ({"adds_bos": True}, {}, "[<s>a</s>]", "<|assistant|>[b<|end|>]"),
        ({"adds_bos": True}, {"add_bos": False}, "[a</s>]", "<|assistant|>[b<|end|>]"),
        ({}, {"add_bos": True}, "[<s>a</s>]", "<s><|assistant|>[b<|end|>]"),
        ({}, {"add_eos": False}, "[a]", "<|assistant|>[b<|end|>]"),
        ({}, {"add_eos": True}, "[a</s>]", "<|assistant|>[b<|end|></s>]"),
        ({"eos": False}, {}, "[a]", "<|assistant|>[b<|end|>]"),
    ],
)
def test_beginning_and_end_of_samples_follow_preprocess(
    tokenizer: dict[str, bool], preprocess: dict[str, bool], text: str, chat: str
) -> None:
    made = make_tokenizer(**tokenizer)
    assert encoded({"text": "a"}, made, **preprocess) == [text]
    row = {"messages": [{"role": "assistant", "content": "b"}]}
    assert encoded(row, made, **preprocess) == [chat]


def test_text_of_which_the_tokenizer_makes_nothing_is_an_error_of_the_row() -> None:
    from tokenizers import normalizers

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(RowError, match="line 7: becomes no token at all"):
        encoded({"text": "\u200b"}, tokenizer)


def test_end_that_is_there_already_is_not_put_twice() -> None:
    assert encoded({"text": "<s>a</s>"}, add_bos=True, add_eos=True) == ["[<s>a</s>]"]


@pytest.mark.parametrize(("option", "tokenizer"), [("add_bos", {"bos": False}), ("add_eos", {"eos": False})])
def test_token_that_the_tokenizer_lacks_cannot_be_added(option: str, tokenizer: dict[str, bool]) -> None:
    with pytest.raises(InputError, match=f"preprocess.{option} is true, and the tokenizer has no such token"):
        encoded({"text": "a"}, make_tokenizer(**tokenizer), **{option: True})


def test_long_row_is_cut_or_refused() -> None:
    row = {"prompt": "123", "completion": "456789"}
    assert encoded(row, length=5) == ["123[45]"]
    with pytest.raises(RowError, match="line 7: has 10 tokens, and max_seq_length is 5; raise it"):
        encoded(row, length=5, truncation=False)
    assert encoded(row, length=10, truncation=False) == ["123[456789</s>]"]


def test_long_document_is_parted_for_pretraining() -> None:
    row = {"text": "0123456789"}
    made = make_tokenizer(adds_bos=True)
    assert encoded(row, made, kind="CONTINUED_PRETRAIN", length=4) == ["[<s>012]", "[3456]", "[789</s>]"]
    assert encoded(row, made, kind="CONTINUED_PRETRAIN", length=4, truncation=True) == ["[<s>012]"]


def test_slow_tokenizer_can_train_on_everything_alone() -> None:
    class Slow:
        is_fast = False
        bos_token_id = eos_token_id = None

        def __call__(self, text: str | list[str], **_: Any) -> dict[str, Any]:
            texts = [text] if isinstance(text, str) else text
            ids = [[ord(sign) for sign in each] for each in texts]
            return {"input_ids": ids[0] if isinstance(text, str) else ids}

    config = TokenizationConfig.from_document(document())
    encoder = Encoder(config, Slow(), 10)
    assert encoder.encode([{"text": "a"}], [ORIGIN])[0][0].input_ids == [97]
    with pytest.raises(InputError, match="set completion_only_loss and assistant_only_loss to false"):
        encoder.encode([{"prompt": "a", "completion": "b"}], [ORIGIN])


def test_preview_shows_a_row_as_it_is_trained_on() -> None:
    encoder = Encoder(TokenizationConfig.from_document(document()), make_tokenizer(), 6)
    row = {"prompt": "q: ", "completion": "abcd"}
    [found] = previews(encoder, row, ORIGIN, encoder.encode([row], [ORIGIN])[0])
    assert found["shape"] == "prompt and completion"
    assert found["tokens"] == ["q", ":", " ", "a", "b", "c"]
    assert found["trained"] == [False] * 3 + [True] * 3
    assert found["segments"] == [
        {"text": "q: ", "tokens": 3, "trained": False},
        {"text": "abc", "tokens": 3, "trained": True},
    ]
    assert (found["length"], found["cut"]) == (8, True)


# Whole builds


def written(directory: Path, name: str, rows: list[dict[str, Any]]) -> LocalSource:
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LocalSource(path=name, files=(directory / name,), format="jsonl")


def built(directory: Path, sources: list[LocalSource], training: dict[str, Any], length: int = 64) -> Built:
    scratch = directory / f"scratch-{len(list(directory.iterdir()))}"
    scratch.mkdir()
    return build(
        TokenizationConfig.from_document(training), make_tokenizer(), sources, max_seq_length=length, directory=scratch
    )


def texts(dataset: Any) -> list[str]:
    tokenizer = make_tokenizer()
    return [shown(tokenizer, row["input_ids"], [label != IGNORED for label in row["labels"]]) for row in dataset]


PAIRS = [{"prompt": f"{number}:", "completion": "x" * (number % 7 + 1)} for number in range(300)]


def test_build_has_every_row_once_parted_for_validation(tmp_path: Path) -> None:
    found = built(tmp_path, [written(tmp_path, "a.jsonl", PAIRS)], document(validation_split=0.1, seed=3))
    assert found.train.column_names == ["input_ids", "labels"]
    assert found.evaluation is not None
    assert (len(found.train), len(found.evaluation)) == (270, 30)
    expected = sorted(f"{row['prompt']}[{row['completion']}</s>]" for row in PAIRS)
    assert sorted(texts(found.train) + texts(found.evaluation)) == expected
    assert found.train_tokens == sum(len(row["input_ids"]) for row in found.train)
    assert (found.cut, found.left_out) == (0, 0)


def test_build_takes_validation_from_sources_of_their_own(tmp_path: Path) -> None:
    sources = [written(tmp_path, "a.jsonl", PAIRS[:20]), written(tmp_path, "b.jsonl", PAIRS[20:25])]
    described = document(sources=[{"path": "a.jsonl"}, {"path": "b.jsonl", "validation": True}])
    found = built(tmp_path, sources, described)
    assert found.evaluation is not None
    assert texts(found.evaluation) == [f"{row['prompt']}[{row['completion']}</s>]" for row in PAIRS[20:25]]
    assert len(found.train) == 20
    assert [source.used for source in found.sources] == [20, 5]


def test_build_is_the_same_again_and_with_several_workers(tmp_path: Path) -> None:
    local = written(tmp_path, "a.jsonl", PAIRS)
    one = built(tmp_path, [local], document(validation_split=0.1, seed=3))
    again = built(tmp_path, [local], document(validation_split=0.1, seed=3))
    parallel = built(tmp_path, [local], document(validation_split=0.1, seed=3, num_workers=2))
    other = built(tmp_path, [local], document(validation_split=0.1, seed=4))
    assert one.train[:] == again.train[:] == parallel.train[:]
    assert one.train[:] != other.train[:]


def test_build_mixes_sources_by_their_weights(tmp_path: Path) -> None:
    sources = [
        written(tmp_path, "a.jsonl", [{"text": "a"}] * 40),
        written(tmp_path, "b.jsonl", [{"text": "b"}] * 10),
    ]
    training = document()
    training["data_config"]["sources"] = [
        {"path": "a.jsonl", "sampling": {"weight": 3}},
        {"path": "b.jsonl", "sampling": {"weight": 1}},
    ]
    found = built(tmp_path, sources, training)
    assert sorted(texts(found.train)) == ["[a</s>]"] * 30 + ["[b</s>]"] * 10
    assert [(source.rows, source.kept, source.used) for source in found.sources] == [(40, 40, 30), (10, 10, 10)]


def test_build_leaves_out_samples_with_nothing_to_train_on(tmp_path: Path) -> None:
    rows = [{"prompt": "12345678", "completion": "x"}, {"prompt": "1", "completion": "xxxxxxxxx"}]
    found = built(tmp_path, [written(tmp_path, "a.jsonl", rows)], document(), length=5)
    assert texts(found.train) == ["1[xxxx]"]
    assert (found.cut, found.left_out) == (2, 1)
    with pytest.raises(InputError, match="no sample is left to train on: with max_seq_length 5"):
        built(tmp_path, [written(tmp_path, "b.jsonl", rows[:1])], document(), length=5)


def test_build_parts_long_documents_for_pretraining(tmp_path: Path) -> None:
    found = built(
        tmp_path, [written(tmp_path, "a.jsonl", [{"text": "0123456789"}])], document("CONTINUED_PRETRAIN"), length=4
    )
    assert texts(found.train) == ["[0123]", "[4567]", "[89</s>]"]
    assert found.train_tokens == 11


@pytest.mark.parametrize("workers", [0, 2])
def test_build_names_the_wrong_row_from_any_process(workers: int, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*PAIRS, {"prompt": "p", "completion": 3}, *PAIRS]
    with pytest.raises(RowError, match=r"a\.jsonl, line 301, column 'completion': is a number; expected text"):
        built(tmp_path, [written(tmp_path, "a.jsonl", rows)], document(num_workers=workers))


def test_tokenizer_takes_the_jobs_options_and_template(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    training = document(preprocess={"chat_template": PLAIN, "tokenizer_config": {"model_max_length": "77"}})
    tokenizer = load_tokenizer(tmp_path, TokenizationConfig.from_document(training).data.preprocess)
    assert tokenizer.chat_template == PLAIN
    assert tokenizer.model_max_length == 77


def test_tokenizer_that_cannot_be_loaded_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(InputError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path, TokenizationConfig.from_document(document()).data.preprocess)


def test_sample_length_is_the_jobs_or_the_models_or_the_tokenizers(tmp_path: Path) -> None:
    assert sample_length(5, tmp_path) == 5
    with pytest.raises(InputError, match=r"set data_config\.max_seq_length"):
        sample_length(None, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    with pytest.raises(InputError):
        sample_length(None, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 300}))
    assert sample_length(None, tmp_path) == 300
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 200}}))
    assert sample_length(None, tmp_path) == 200


@pytest.mark.parametrize(
    ("config", "model_kwargs", "positions"),
    [
        ({"n_positions": 1024}, {}, 1024),
        ({"max_position_embeddings": 2048}, {}, 2048),
        ({"text_config": {"max_position_embeddings": 2048}}, {}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2.0}}, {}, 4096),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            {},
            131_072,
        ),
        (
            {
                "max_position_embeddings": 32_768,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            {},
            131_072,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, {}, 2048),
        ({"max_position_embeddings": 2048}, {"rope_scaling": '{"rope_type": "linear", "factor": 4}'}, 8192),
        ({"max_position_embeddings": 2048}, {"max_position_embeddings": "4096"}, 4096),
        ({"model_type": "mamba"}, {}, None),
    ],
)
def test_length_above_the_positions_of_the_model_is_refused(
    tmp_path: Path, config: dict[str, Any], model_kwargs: dict[str, str], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    longest = positions or 10**6
    assert sample_length(longest, tmp_path, model_kwargs=model_kwargs) == longest
    if positions is not None:
        with pytest.raises(
            InputError, match=f"the base model has {positions} positions; set it to at most {positions}"
        ):
            sample_length(positions + 1, tmp_path, model_kwargs=model_kwargs)
