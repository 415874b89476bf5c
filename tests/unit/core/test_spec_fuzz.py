"""Whatever a document holds, it is parsed or refused with problems that can be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spec_documents import COMMAND, CUSTOM, changed
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse_submit
from trainmaster.server.core.spec.submit import compile_job

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too: JSON can spell them
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


def places(document: Any, prefix: str = "") -> list[str]:
    items = document.items() if isinstance(document, dict) else ()
    return [path for key, value in items for path in (f"{prefix}{key}", *places(value, f"{prefix}{key}."))]


DOCUMENTS = [COMMAND, CUSTOM, *({**COMMAND, "workload": {"kind": kind}} for kind in ("script", "service"))]
DUMPED = [dump(parse_submit(document)) for document in (COMMAND, CUSTOM)]
PLACES = [(document, path) for document in [*DOCUMENTS, *DUMPED] for path in places(document)]


def check(document: Any) -> None:
    try:
        request = parse_submit(document)
    except SpecError as error:
        json.dumps([(problem.field, problem.message) for problem in error.problems], ensure_ascii=False).encode()
    except RefusedError:
        pass
    else:
        stored = dump(request)
        json.dumps(stored, ensure_ascii=False, allow_nan=False).encode()
        assert dump(load_stored(SPEC_VERSION, stored)) == stored
        compile_job(request)


@given(JSON)
def test_any_json_is_parsed_or_refused(document: Any) -> None:
    check(document)


@given(st.sampled_from(PLACES), JSON)
def test_document_with_any_value_anywhere_is_parsed_or_refused(place: tuple[dict[str, Any], str], value: Any) -> None:
    document, path = place
    check(changed(document, path, value))


@given(st.sampled_from(PLACES), TEXT, JSON)
@example((CUSTOM, "data_config"), "[key]", 1)
def test_document_with_any_field_added_is_parsed_or_refused(
    place: tuple[dict[str, Any], str], name: str, value: Any
) -> None:
    document, path = place
    check(changed(document, path, {name: value}))


@pytest.mark.parametrize("depth", [200, 900, 5000])
def test_document_that_is_nested_deeply_is_parsed_or_refused(depth: int) -> None:
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    check(changed(CUSTOM, "data_config.sources[0].filters", nested))
    check(changed(COMMAND, "labels", nested))
