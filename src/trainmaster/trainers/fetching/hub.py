"""Models and datasets of the Hugging Face Hub, by its own client: revisions, tokens, and a cache that others share."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.trainers.errors import CredentialsError, InputError, UnavailableError
from trainmaster.trainers.fetching.access import Access
from trainmaster.trainers.progress import Tell, tell_nobody

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
_ASKING = "huggingface_hub.utils._http"
"""The client's logger of requests that it makes again."""
_DATASET = re.compile(
    r"(?:datasets/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<early>[^/]+))?(?:/(?P<path>.*?))?(?:@(?P<late>[^@]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetName:
    """What `hf://owner/name[/path][@revision]` names."""

    repo: str
    path: str
    revision: str | None


def dataset_name(path: str) -> DatasetName:
    """Read the name of a dataset.

    >>> dataset_name("hf://owner/name/data/*.parquet@v1")
    DatasetName(repo='owner/name', path='data/*.parquet', revision='v1')

    Raises:
        InputError: it is not written like that.
    """
    found = _DATASET.fullmatch(path.removeprefix("hf://").rstrip("/"))
    if found is None:
        raise InputError(
            f"{path}: write a dataset as hf://owner/name, hf://owner/name/path, or with @revision at its end"
        )
    return DatasetName(repo=found["repo"], path=found["path"] or "", revision=found["late"] or found["early"])


def model(repo: str, revision: str | None, access: Access, tell: Tell = tell_nobody) -> Path:
    """The directory of a model: its configuration, tokenizer and weights, in one form."""
    shown = _shown(repo, revision)
    with _translated(shown, access):
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
    with _translated(_shown(repo, revision), access):
        return _snapshot(repo, revision, "model", access, tell, allow_patterns=list(TOKENIZER_PATTERNS))


def dataset_files(name: DatasetName, access: Access) -> list[str]:
    """The names of all files of a dataset."""
    with _translated(_shown(name.repo, name.revision), access):
        return _files(name.repo, name.revision, "dataset", access)


def dataset(name: DatasetName, files: Sequence[str], access: Access, tell: Tell = tell_nobody) -> list[Path]:
    """Some files of a dataset."""
    with _translated(_shown(name.repo, name.revision), access):
        escaped = [re.sub(r"([*?\[])", r"[\1]", file) for file in files]
        directory = _snapshot(name.repo, name.revision, "dataset", access, tell, allow_patterns=escaped)
    return [directory / file for file in files]


def _files(repo: str, revision: str | None, kind: str, access: Access) -> list[str]:
    """What a repository holds; nothing where the Hub is not to be asked."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _kept_files(repo, revision, kind, access)
    api = HfApi(endpoint=_endpoint(), token=access.hub_token, library_name=_LIBRARY)
    try:
        return list(api.list_repo_files(repo, revision=revision, repo_type=kind))
    except Exception as error:
        if _status(error) in (401, 403, 404):
            raise
        # The Hub does not answer; what is here may do.
        with contextlib.suppress(LocalEntryNotFoundError):
            return _kept_files(repo, revision, kind, access)
        raise


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

    return Path(
        snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            cache_dir=_cache(repo, kind, access),
            endpoint=_endpoint(),
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
    if (usual / f"{kind}s--{repo.replace('/', '--')}").is_dir() and os.access(usual, os.W_OK):
        return usual
    return access.cache / "hub"


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


@contextlib.contextmanager
def _translated(shown: str, access: Access) -> Iterator[None]:
    """The client's errors as ours."""
    from huggingface_hub import constants, errors

    token = "the token that was sent" if access.hub_token or os.environ.get("HF_TOKEN") else "no token was sent"
    try:
        with _trying_again_told_once():
            yield
    except errors.GatedRepoError as error:
        raise CredentialsError(
            f"{shown}: access is granted by its owner alone ({token}); ask for it at {_endpoint()}, and give a "
            "token in training_config.environment.HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        if _status(error) in (401, 403) and (access.hub_token or os.environ.get("HF_TOKEN")):
            raise CredentialsError(f"{shown}: the Hub refuses the token, or there is no such repository") from error
        raise InputError(
            f"{shown}: the Hub has no such repository, or it is private ({token}); check the name, or give a token in "
            "training_config.environment.HF_TOKEN. A model of this machine is written with a leading / or ./"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{shown}: the repository has no such revision") from error
    except errors.HFValidationError as error:
        raise InputError(f"{shown} is no name of a repository on the Hub: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise InputError(
                f"{shown}: it is not on this machine, and HF_HUB_OFFLINE keeps it from being fetched; unset that, or "
                "fetch it before"
            ) from error
        raise _unavailable(shown, "does not answer", error) from error
    except errors.HfHubHTTPError as error:
        if _status(error) in (401, 403):
            raise CredentialsError(f"{shown}: the Hub refuses it ({token}): {_first_line(error)}") from error
        if _status(error) == 404:
            raise InputError(f"{shown}: the Hub does not have it: {_first_line(error)}") from error
        raise _unavailable(shown, "fails", error) from error
    except OSError as error:
        if error.errno is not None:
            raise  # of this machine: its disk is full, say
        raise _unavailable(shown, "does not answer", error) from error
    except Exception as error:
        # The client's transport has errors of its own, which are no OSError.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise _unavailable(shown, "does not answer", error) from error


def _unavailable(shown: str, what: str, error: BaseException) -> UnavailableError:
    return UnavailableError(
        f"{shown}: the Hub at {_endpoint()} {what}: {_first_line(error)}. If this machine cannot reach it, name a "
        "mirror in training_config.environment.HF_ENDPOINT, or a directory of this machine, with a leading / or ./"
    )


@contextlib.contextmanager
def _trying_again_told_once() -> Iterator[None]:
    """Let the client say only once that it tries again; how that ended is ours to say."""
    logger, told = logging.getLogger(_ASKING), False

    def first(record: logging.LogRecord) -> bool:
        nonlocal told
        if record.levelno != logging.WARNING:
            return True
        told, again = True, told
        record.msg, record.args = f"The Hub is asked again for a while: {record.getMessage()}", ()
        return not again

    logger.addFilter(first)
    try:
        yield
    finally:
        logger.removeFilter(first)


def _status(error: Any) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _shown(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo
