"""Models and datasets of the Hugging Face Hub, by its own client."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainmaster.server.core.training.sources import HubName, hub_name
from trainmaster.training import steps
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, key_of
from trainmaster.training.fetching.file_choice import is_ignored
from trainmaster.training.steps import CredentialsError, InputError, OnProgress, SourceUnavailableError, ignore_progress

TOKENIZER_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "tekken.json", "config.json", "generation_config.json", "*.py",
)  # fmt: skip
_OTHER_FORMS = (
    "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite", "*.ot", "*.mlmodel",
    "*.mlpackage/*", "onnx/*", "openvino/*", "original/*", "coreml/*", "gguf/*", "*.zip", "*.tar", "*.tar.gz",
    "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "runs/*",
)  # fmt: skip
"""The same weights in other formats, and files that a trainer left beside them."""
_LIBRARY = "trainmaster"


def name_of(uri: str) -> HubName:
    found = hub_name(uri)
    if found is None:
        raise InputError(
            f"{uri}: write it as hf://owner/name, hf://name or hf://owner/name/path, with @revision at its end or not"
        )
    return found


def model(repo: str, revision: str | None, access: Access, on_progress: OnProgress = ignore_progress) -> Path:
    shown = _shown(repo, revision)
    with translated(shown, access):
        names = _files(repo, revision, "model", access)
        ignored = [*_OTHER_FORMS]
        if any(fnmatch.fnmatch(name, "*.safetensors") for name in names):
            ignored.append("*.bin")
        elif names and not any(fnmatch.fnmatch(name, "*.bin") for name in names):
            raise InputError(f"{shown} holds no weights that can be loaded: neither *.safetensors nor *.bin")
        return _snapshot(repo, revision, "model", access, on_progress, ignore_patterns=ignored)


def tokenizer(repo: str, revision: str | None, access: Access) -> Path:
    with translated(_shown(repo, revision), access):
        return _snapshot(repo, revision, "model", access, ignore_progress, allow_patterns=list(TOKENIZER_PATTERNS))


def dataset_files(name: HubName, access: Access) -> list[str]:
    with translated(_shown(name.repo, name.revision), access):
        return _files(name.repo, name.revision, "dataset", access)


def dataset(
    name: HubName, files: Sequence[str], access: Access, on_progress: OnProgress = ignore_progress
) -> list[Path]:
    with translated(_shown(name.repo, name.revision), access):
        directory = _snapshot(name.repo, name.revision, "dataset", access, on_progress, allow_patterns=_exactly(files))
    return [directory / file for file in files]


def repository(
    uri: str, kind: str, access: Access, on_progress: OnProgress = ignore_progress, *, ignored: Sequence[str] = ()
) -> dict[str, Path]:
    """The files of a dataset's or model's repository, or of the part that the URI names, by their paths in it."""
    name = name_of(uri)
    with translated(_shown(name.repo, name.revision), access):
        # What was fetched before may be a part of it alone, and nobody could tell.
        found = [file for file in _files(name.repo, name.revision, kind, access, kept=False) if _is_in(file, name.path)]
        if not found:
            raise InputError(f"{uri}: the repository holds no such file")
        wanted = [file for file in found if not is_ignored(file, ignored)]
        if not wanted:
            raise InputError(f"{uri}: nothing is left of it; check the patterns of what is ignored")
        directory = _snapshot(name.repo, name.revision, kind, access, on_progress, allow_patterns=_exactly(wanted))
    if missing := [file for file in wanted if not (directory / file).is_file()]:
        raise SourceUnavailableError(f"{uri}: {missing[0]} did not come; the repository was changed meanwhile")
    return {file: directory / file for file in wanted}


def _is_in(file: str, path: str) -> bool:
    return not path or file == path or file.startswith(f"{path}/") or fnmatch.fnmatch(file, path)


def _exactly(files: Sequence[str]) -> list[str]:
    return [re.sub(r"([*?\[])", r"[\1]", file) for file in files]


def _files(repo: str, revision: str | None, kind: str, access: Access, *, kept: bool = True) -> list[str]:
    """The files of a repository. Where the Hub does not answer: its last listing, or, if allowed, what is cached."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _cached_files(repo, revision, kind, access)
    api = HfApi(endpoint=endpoint(), token=access.hub_token, library_name=_LIBRARY)
    last_listing = access.cache / "listings" / key_of(endpoint(), kind, repo, revision)
    try:
        names = list(api.list_repo_files(repo, revision=revision, repo_type=kind))
    except Exception as error:
        if status_of(error) in (401, 403, 404):
            raise
        # The Hub does not answer; a cached listing may do.
        if last_listing.is_file():
            return list(json.loads(last_listing.read_text()))
        if not kept:
            raise
        with contextlib.suppress(LocalEntryNotFoundError):
            return _cached_files(repo, revision, kind, access)
        raise
    last_listing.parent.mkdir(parents=True, exist_ok=True)
    steps.write_whole(last_listing, json.dumps(names))
    return names


def _cached_files(repo: str, revision: str | None, kind: str, access: Access) -> list[str]:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        repo, repo_type=kind, revision=revision, cache_dir=_cache(repo, kind, access), local_files_only=True,
        allow_patterns=[],
    )  # fmt: skip
    return [path.relative_to(found).as_posix() for path in sorted(Path(found).rglob("*")) if path.is_file()]


def _snapshot(
    repo: str, revision: str | None, kind: str, access: Access, on_progress: OnProgress, **patterns: Any
) -> Path:
    from huggingface_hub import snapshot_download

    place = _cache(repo, kind, access)
    with Cache(access.cache).lock("hub", key_of(kind, repo)):
        if place == access.cache / "hub":
            # The client does not resume partial files of a killed one.
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
                tqdm_class=_meter(on_progress),
                **patterns,
            )
        )


def _cache(repo: str, kind: str, access: Access) -> Path:
    from huggingface_hub import constants

    usual = Path(constants.HF_HUB_CACHE)
    usable = (usual / _folder(repo, kind)).is_dir() and os.access(usual, os.W_OK)
    return usual if usable else access.cache / "hub"


def _folder(repo: str, kind: str) -> str:
    return f"{kind}s--{repo.replace('/', '--')}"


def _meter(on_progress: OnProgress) -> type:
    """A progress bar for the client, which draws nothing and passes on the bytes that it counts."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Meter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})
            self._counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_bytes and self.total:
                on_progress(self.n / self.total)
            return None

    return Meter


def _shown(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo


_ASKING = "huggingface_hub.utils._http"
"""The client's logger of requests that it makes again."""
_CLIENT_PATIENCE = "2 minutes"
"""The client tries six times, waits for up to 10 s each time, and for up to 8 s in between."""


@contextlib.contextmanager
def translated(shown: str, access: Access) -> Iterator[None]:
    """Raise the client's errors as ours. `shown` is the repository's name in messages."""
    from huggingface_hub import constants, errors

    token = "the token that was sent" if access.hub_token or os.environ.get("HF_TOKEN") else "no token was sent"
    try:
        steps.doing(f"fetching {shown} from {endpoint()}")
        with _only_first_retry_reported(shown):
            yield
    except errors.GatedRepoError as error:
        raise CredentialsError(
            f"{shown}: access is granted by its owner alone ({token}); ask for it at {endpoint()}, and "
            f"{access.remedies.hub_token}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        if status_of(error) in (401, 403) and (access.hub_token or os.environ.get("HF_TOKEN")):
            raise CredentialsError(
                f"{shown}: the Hub refuses the token, or there is no such repository; {access.remedies.hub_token}"
            ) from error
        raise InputError(
            f"{shown}: the Hub has no such repository, or it is private ({token}); {access.remedies.hub_name}; "
            f"or {access.remedies.hub_token}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{shown}: the repository has no such revision") from error
    except errors.HFValidationError as error:
        raise InputError(f"{shown} is not the name of a repository on the Hub: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise InputError(
                f"{shown}: it is not on this machine, and HF_HUB_OFFLINE keeps it from being fetched; unset that, or "
                "fetch it before"
            ) from error
        raise _unavailable(shown, "does not answer", error, access) from error
    except errors.HfHubHTTPError as error:
        if status_of(error) in (401, 403):
            said = _first_line(error)
            raise CredentialsError(
                f"{shown}: the Hub refuses it ({token}): {said}; {access.remedies.hub_token}"
            ) from error
        if status_of(error) == 404:
            raise InputError(f"{shown}: the Hub does not have it: {_first_line(error)}") from error
        raise _unavailable(shown, "fails", error, access) from error
    except OSError as error:
        if error.errno is not None:
            raise  # of this machine, such as a full disk
        raise _unavailable(shown, "does not answer", error, access) from error
    except Exception as error:
        # Errors of the client's transport are no OSError.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise _unavailable(shown, "does not answer", error, access) from error


def _unavailable(shown: str, what: str, error: BaseException, access: Access) -> SourceUnavailableError:
    return SourceUnavailableError(
        f"{shown}: the Hub at {endpoint()} {what}: {_first_line(error)}. If this machine cannot reach it, "
        f"{access.remedies.hub_mirror}"
    )


@contextlib.contextmanager
def _only_first_retry_reported(shown: str) -> Iterator[None]:
    """Report only the client's first retry; the outcome is reported by us."""
    logger, told = logging.getLogger(_ASKING), False
    doing_so = f"{shown}: the Hub at {endpoint()} does not answer; it is asked again, for up to {_CLIENT_PATIENCE}"

    def first(record: logging.LogRecord) -> bool:
        nonlocal told
        if record.levelno != logging.WARNING:
            return True
        if not told:
            told = True
            steps.doing(f"{doing_so}: {record.getMessage()}")
        return False

    logger.addFilter(first)
    try:
        yield
    finally:
        logger.removeFilter(first)


def status_of(error: Any) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
