"""Brings what a job names to this machine: base model, tokenizer and data files, kept in the account's cache."""

from __future__ import annotations

from pathlib import Path

from trainmaster.server.core.errors import choice_message
from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataConfig, DataSource
from trainmaster.server.core.training.sources import SOURCE_TYPES, fixed_part, scheme_of
from trainmaster.training.data.formats import BEGINNING_SUFFICES, format_of
from trainmaster.training.document import LocalSource
from trainmaster.training.fetching import http, hub, s3
from trainmaster.training.fetching.access import Access, local_files
from trainmaster.training.fetching.file_choice import CARD, card_data, choose, choose_file, choose_from_hub
from trainmaster.training.fetching.models import fetch_model, fetch_tokenizer
from trainmaster.training.steps import InputError, OnProgress, PreparingProgress, files_text, ignore_progress, note


def fetch_named_model(base_model: BaseModelConfig, access: Access, progress: PreparingProgress) -> Path:
    model = fetch_model(base_model, access, lambda share: progress.at(share, "fetching the model"))
    if model.is_relative_to(access.cache):  # one that was on this machine already is no news
        note(f"{base_model.model_id}: {files_text([path for path in model.rglob('*') if path.is_file()])}")
    return model


def fetch_named_tokenizer(data: DataConfig, base_model: BaseModelConfig, access: Access) -> Path | None:
    name = data.preprocess.tokenizer_id or base_model.tokenizer_id
    return fetch_tokenizer(name, base_model, access) if name else None


def fetch_sources(data: DataConfig, access: Access, progress: PreparingProgress) -> list[LocalSource]:
    """Raises PreparingError where a source cannot be fetched."""
    found = []
    for number, source in enumerate(data.sources):

        def tell(share: float, number: int = number, path: str = source.path) -> None:
            progress.at((number + share) / len(data.sources), f"fetching {path}")

        local = fetch_source(source, access, tell)
        note(f"{local.path}: {files_text(local.files, local.format)}")
        found.append(local)
    progress.at(1.0)
    return found


def fetch_source(source: DataSource, access: Access, on_progress: OnProgress = ignore_progress) -> LocalSource:
    scheme = _scheme(source)
    path = source.path if scheme_of(source.path) else f"{scheme}://{source.path}"
    match scheme:
        case "hf":
            return _from_hub(source, path, access, on_progress)
        case "s3":
            return _from_s3(source, path, access, on_progress)
        case "http" | "https":
            return _from_url(source, http.target_of(path), access, on_progress)
        case "scaidrive" | "scaiatlas":
            return _from_url(source, http.service_target(scheme, path, access), access, on_progress)
        case _:
            return _from_files(source, access)


def _scheme(source: DataSource) -> str:
    scheme = scheme_of(source.path)
    if source.type is None:
        return scheme or "file"
    typed = SOURCE_TYPES.get(source.type.lower())
    if typed is None:
        raise InputError(f"{source.path}: {choice_message('type', source.type, SOURCE_TYPES)}")
    if scheme is not None and {scheme, typed} not in ({scheme}, {"http", "https"}):
        raise InputError(f"{source.path}: its type is {source.type}, and its path begins with {scheme}://; change one")
    return scheme or typed


def _from_files(source: DataSource, access: Access) -> LocalSource:
    found = local_files(source.path, access)
    if found.is_file:
        chosen = choose_file(found.paths[0].name, source.path, format=source.format, split=source.split)
        return chosen.local(source.path, found.paths * len(chosen.names))
    # Directories above all of them tell nothing about a file.
    names = {path.relative_to(found.top).as_posix(): path for path in found.paths}
    chosen = choose(list(names), source.path, format=source.format, split=source.split, explicit=found.is_pattern)
    return chosen.local(source.path, [names[name] for name in chosen.names])


def _from_hub(source: DataSource, path: str, access: Access, on_progress: OnProgress) -> LocalSource:
    name = hub.name_of(path)
    names = hub.dataset_files(name, access)
    card = hub.dataset(name, [CARD], access)[0].read_text(errors="replace") if CARD in names else ""
    chosen = choose_from_hub(
        names, source.path, path=name.path, format=source.format, split=source.split, card=card_data(card)
    )
    fetched = hub.dataset(name, chosen.names[:1] if access.beginning_bytes else chosen.names, access, on_progress)
    return chosen.local(source.path, fetched, whole=len(fetched) == len(chosen.names))


def _from_s3(source: DataSource, path: str, access: Access, on_progress: OnProgress) -> LocalSource:
    below = fixed_part(path.removeprefix("s3://").partition("/")[2])
    # Directories above all of them tell nothing about a file.
    found = {meta["path"].removeprefix(below).lstrip("/"): meta for meta in s3.find(path, access)}
    if list(found) == [""]:
        chosen = choose_file(below, source.path, format=source.format, split=source.split)
        metas = [found[""] for _ in chosen.names]
    else:
        explicit = fixed_part(path) != path
        chosen = choose(list(found), source.path, format=source.format, split=source.split, explicit=explicit)
        metas = [found[name] for name in chosen.names]
    fetched = s3.fetch(path, metas[:1] if access.beginning_bytes else metas, access, on_progress)
    whole = len(fetched) == len(metas) and all(each.whole for each in fetched)
    return _readable(chosen.local(source.path, [each.path for each in fetched], whole=whole), access)


def _from_url(source: DataSource, target: http.Target, access: Access, on_progress: OnProgress) -> LocalSource:
    shown, fetched = target.shown, http.download(target, access, on_progress)
    name = fetched.path.name
    # The URL may tell the format where the file's name does not.
    found = source.format or format_of(name) or format_of(source.path)
    chosen = choose_file(name, shown, format=found, split=source.split)
    return _readable(chosen.local(shown, [fetched.path] * len(chosen.names), whole=fetched.whole), access)


def _readable(local: LocalSource, access: Access) -> LocalSource:
    if not local.whole and local.format not in BEGINNING_SUFFICES and len(local.files) == 1 and (
        access.beginning_bytes is not None and local.files[0].stat().st_size >= access.beginning_bytes
    ):  # fmt: skip
        limit = access.beginning_bytes >> 20
        raise InputError(
            f"{local.path} has more than {limit} MiB, and rows of {local.format} cannot be read from its beginning; "
            "check a smaller file of the same kind"
        )
    return local
