"""Models and datasets of the Hugging Face Hub, by its own client: revisions, tokens, and a cache that others share."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmaster.server.core.training.sources import HubName, hub_name
from trainmaster.training.errors import InputError, UnavailableError
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, key_of, write_whole
from trainmaster.training.fetching.file_choice import is_ignored
from trainmaster.training.fetching.hub_errors import endpoint, status_of, translated
from trainmaster.training.progress import Tell, tell_nobody

TOKENIZER_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "tekken.json", "config.json", "generation_config.json", "*.py",
)  # fmt: skip
"""The files of a repository that a tokenizer may need."""
_OTHER_FORMS = (
    "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite", "*.ot", "*.mlmodel",
    "*.mlpackage/*", "onnx/*", "openvino/*", "original/*", "coreml/*", "gguf/*", "*.zip", "*.tar", "*.tar.gz",
    "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "runs/*",
)  # fmt: skip
"""The same weights again, or what a trainer left beside them."""
_LIBRARY = "trainmaster"


def name_of(uri: str) -> HubName:
    """What a URI names.

    Raises:
        InputError: it is not written like one of the Hub.
    """
    found = hub_name(uri)
    if found is None:
        raise InputError(
            f"{uri}: write it as hf://owner/name, hf://name or hf://owner/name/path, with @revision at its end or not"
        )
    return found


def model(repo: str, revision: str | None, access: Access, tell: Tell = tell_nobody) -> Path:
    """The directory of a model: its configuration, tokenizer and weights, in one form."""
    shown = _shown(repo, revision)
    with translated(shown, access):
        names = _files(repo, revision, "model", access)
        if not any(fnmatch.fnmatch(name, "*.safetensors") for name in names):
            if names and not any(fnmatch.fnmatch(name, "*.bin") for name in names):
                raise InputError(f"{shown} holds no weights that can be loaded: neither *.safetensors nor *.bin")
            ignored: tuple[str, ...] = _OTHER_FORMS
        else:
            ignored = (*_OTHER_FORMS, "*.bin")
        return _snapshot(repo, revision, "model", access, tell, ignore_patterns=list(ignored))


def tokenizer(repo: str, revision: str | None, access: Access, tell: Tell = tell_nobody) -> Path:
    """The directory of a model's tokenizer, without the weights."""
    with translated(_shown(repo, revision), access):
        return _snapshot(repo, revision, "model", access, tell, allow_patterns=list(TOKENIZER_PATTERNS))


def dataset_files(name: HubName, access: Access) -> list[str]:
    """The names of all files of a dataset."""
    with translated(_shown(name.repo, name.revision), access):
        return _files(name.repo, name.revision, "dataset", access)


def dataset(name: HubName, files: Sequence[str], access: Access, tell: Tell = tell_nobody) -> list[Path]:
    """Some files of a dataset."""
    with translated(_shown(name.repo, name.revision), access):
        directory = _snapshot(name.repo, name.revision, "dataset", access, tell, allow_patterns=_exactly(files))
    return [directory / file for file in files]


def repository(
    uri: str, kind: str, access: Access, tell: Tell = tell_nobody, *, ignored: Sequence[str] = ()
) -> dict[str, Path]:
    """The files of a repository, or of the part of one that a URI names, by their paths in it.

    Args:
        uri: what to bring.
        kind: `dataset` or `model`.
        access: what may be reached.
        tell: told which share is done.
        ignored: patterns of what is left out.

    Raises:
        InputError: there is no such repository, or nothing of this name in it.
        CredentialsError: the Hub refuses the token, or wants one.
        UnavailableError: it does not answer.
    """
    name = name_of(uri)
    with translated(_shown(name.repo, name.revision), access):
        # What was fetched before may be a part of it alone, of which nobody could tell.
        found = [file for file in _files(name.repo, name.revision, kind, access, kept=False) if _is_in(file, name.path)]
        if not found:
            raise InputError(f"{uri}: the repository holds no such file")
        wanted = [file for file in found if not is_ignored(file, ignored)]
        if not wanted:
            raise InputError(f"{uri}: nothing is left of it; check the patterns of what is ignored")
        directory = _snapshot(name.repo, name.revision, kind, access, tell, allow_patterns=_exactly(wanted))
    if missing := [file for file in wanted if not (directory / file).is_file()]:
        raise UnavailableError(f"{uri}: {missing[0]} did not come; the repository was changed meanwhile")
    return {file: directory / file for file in wanted}


def _is_in(file: str, path: str) -> bool:
    return not path or file == path or file.startswith(f"{path}/") or fnmatch.fnmatch(file, path)


def _exactly(files: Sequence[str]) -> list[str]:
    """Patterns that match these files alone."""
    return [re.sub(r"([*?\[])", r"[\1]", file) for file in files]


def _files(repo: str, revision: str | None, kind: str, access: Access, *, kept: bool = True) -> list[str]:
    """What a repository holds. Where the Hub does not answer: what it said before, or what was `kept`, if wanted."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _kept_files(repo, revision, kind, access)
    api = HfApi(endpoint=endpoint(), token=access.hub_token, library_name=_LIBRARY)
    said_before = access.cache / "listings" / key_of(endpoint(), kind, repo, revision)
    try:
        names = list(api.list_repo_files(repo, revision=revision, repo_type=kind))
    except Exception as error:
        if status_of(error) in (401, 403, 404):
            raise
        # The Hub does not answer; what is here may do.
        if said_before.is_file():
            return list(json.loads(said_before.read_text()))
        if not kept:
            raise
        with contextlib.suppress(LocalEntryNotFoundError):
            return _kept_files(repo, revision, kind, access)
        raise
    said_before.parent.mkdir(parents=True, exist_ok=True)
    write_whole(said_before, json.dumps(names))
    return names


def _kept_files(repo: str, revision: str | None, kind: str, access: Access) -> list[str]:
    """What of a repository was fetched before."""
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        repo, repo_type=kind, revision=revision, cache_dir=_cache(repo, kind, access), local_files_only=True,
        allow_patterns=[],
    )  # fmt: skip
    return [path.relative_to(found).as_posix() for path in sorted(Path(found).rglob("*")) if path.is_file()]


def _snapshot(repo: str, revision: str | None, kind: str, access: Access, tell: Tell, **patterns: Any) -> Path:
    from huggingface_hub import snapshot_download

    place = _cache(repo, kind, access)
    with Cache(access.cache).lock("hub", key_of(kind, repo)):
        if place == access.cache / "hub":
            # The client never goes on with what a killed one left of a file.
            for left in (place / _folder(repo, kind) / "blobs").glob("*.incomplete"):
                left.unlink(missing_ok=True)
        return Path(
            snapshot_download(
                repo,
                repo_type=kind,
                revision=revision,
                cache_dir=place,
                endpoint=endpoint(),
                token=access.hub_token,
                library_name=_LIBRARY,
                tqdm_class=_meter(tell),
                **patterns,
            )
        )


def _cache(repo: str, kind: str, access: Access) -> Path:
    """Where the client keeps the repository: where it does already, if it does."""
    from huggingface_hub import constants

    usual = Path(constants.HF_HUB_CACHE)
    if (usual / _folder(repo, kind)).is_dir() and os.access(usual, os.W_OK):
        return usual
    return access.cache / "hub"


def _folder(repo: str, kind: str) -> str:
    return f"{kind}s--{repo.replace('/', '--')}"


def _meter(tell: Tell) -> Any:
    """What the client takes for a progress bar; the one that counts bytes is passed on."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Meter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                tell(self.n / self.total)
            return shown

    return Meter


class _Nowhere:
    """A file into which bars are drawn that nobody sees."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """There is nothing to flush."""


def _shown(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo
