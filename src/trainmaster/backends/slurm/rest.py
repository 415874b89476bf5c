"""A Slurm cluster as slurmrestd shows it: this machine needs none of Slurm's programs, and no munge."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from trainmaster.backends.cluster.engine import EngineAwayError, EngineLaunch
from trainmaster.backends.slurm import rest_documents as documents
from trainmaster.backends.slurm.access import SlurmCluster, SlurmRefusedError
from trainmaster.backends.slurm.inventory import SlurmNode
from trainmaster.backends.slurm.listing import SlurmJob
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.backends.slurm.refusals import CONTROLLER_AWAY, passing_problem
from trainmaster.backends.slurm.render import comment_of, rest_environment

_log = logging.getLogger(__name__)

_FRESH_S = 1.0
"""There is no list of a single name: a list so young says whether a job is there that this process did not submit."""
_UNKNOWN_JOB = re.compile(r"invalid job id|already complet|nothing found", re.IGNORECASE)
_UNSPECIFIED = "Unspecified error"
"""All that version v0.0.38 says of a controller that is away, and of a token that is not valid."""
_RENEW = (
    "make another with `scontrol token username=USER lifespan=SECONDS`, which lives as long as jobs run there, and set "
    "the option token"
)


class SlurmRest:
    def __init__(self, instance: str, options: SlurmOptions, *, timeout_s: float) -> None:
        self._instance = instance
        self._options = options
        self._url = options.rest_url.rstrip("/")
        self._token = options.token.get_secret_value()
        headers = {"X-SLURM-USER-TOKEN": self._token, "X-SLURM-USER-NAME": options.rest_user}
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout_s)
        self._lock = threading.Lock()
        self._paths: frozenset[str] = frozenset()
        """What slurmrestd answers to, as it says itself."""
        self._list: tuple[float, Sequence[SlurmJob]] = (float("-inf"), ())
        """When jobs were last asked for, and what there was."""
        self._submitted: set[str] = set()
        """Names that this process sent, and that no list has shown as ended."""

    def cluster(self) -> SlurmCluster:
        document = self._get("partitions")
        version, name = documents.release_of(document)
        return SlurmCluster(version, name or self._url, documents.partitions_in(document))

    def nodes(self) -> tuple[SlurmNode, ...]:
        return documents.nodes_in(self._get("nodes"))

    def jobs(self, name: str = "") -> Sequence[SlurmJob]:
        with self._lock:
            asked_at, known = self._list
            is_known = name and name not in self._submitted and time.monotonic() - asked_at < _FRESH_S
        if is_known:
            return known
        asked_at = time.monotonic()
        found = tuple(documents.jobs_in(self._get("jobs"), self._instance))
        with self._lock:
            self._list = max(self._list, (asked_at, found), key=lambda each: each[0])
            self._submitted -= {job.name for job in found if job.has_ended}
        return found

    def ended(self, *, names: Sequence[str] = (), handles: Sequence[str] = ()) -> Sequence[SlurmJob]:
        found: list[SlurmJob] = []
        try:
            prefix = f"/slurmdb/v0.0.{self._version()}"
            if f"{prefix}/jobs" not in self._paths:
                return found
            for handle in handles:
                found += self._accounted(f"{prefix}/job/{handle}")
            for name in names:
                found += self._accounted(f"{prefix}/jobs", job_name=name)
        except (EngineAwayError, SlurmRefusedError) as error:
            _log.warning("Slurm's accounting does not answer: %s", error)
        return found

    def _accounted(self, path: str, **parameters: str) -> Sequence[SlurmJob]:
        try:
            return tuple(documents.jobs_in(self._sent("GET", path, params=parameters), self._instance))
        except SlurmRefusedError as error:
            if _UNKNOWN_JOB.search(str(error)):
                return ()
            raise

    def submit(self, launch: EngineLaunch, script: str) -> str:
        version = self._version()
        environment = rest_environment(launch, self._options)
        body = documents.submission(script, comment_of(launch), environment, version)
        with self._lock:
            self._submitted.add(launch.name)
        answer = self._sent("POST", f"/slurm/v0.0.{version}/job/submit", json=body)
        handle = str(answer.get("job_id") or "")
        if not handle.isdigit():
            raise EngineAwayError(f"{self._url} answered {answer} in place of a job id")
        return handle

    def cancel(self, handle: str) -> None:
        try:
            self._sent("DELETE", f"/slurm/v0.0.{self._version()}/job/{handle}")
        except SlurmRefusedError as error:
            if not _UNKNOWN_JOB.search(str(error)):
                raise EngineAwayError(f"Slurm does not cancel job {handle}: {error}") from error

    def close(self) -> None:
        self._http.close()

    # -- asking --

    def _get(self, what: str) -> Mapping[str, Any]:
        try:
            return self._sent("GET", f"/slurm/v0.0.{self._version()}/{what}")
        except SlurmRefusedError as error:
            raise EngineAwayError(f"{self._url} does not show {what}: {error}") from error

    def _version(self) -> int:
        """The newest one that both sides understand."""
        if not self._paths:
            self._paths = frozenset(self._sent("GET", "/openapi/v3").get("paths") or ())
        offered = {int(found[1]) for path in self._paths if (found := re.match(r"/slurm/v0\.0\.(\d+)/jobs", path))}
        known = [number for number in offered if documents.OLDEST <= number <= documents.NEWEST]
        if not known:
            self._paths, names = frozenset(), ", ".join(f"v0.0.{number}" for number in sorted(offered)) or "none"
            raise EngineAwayError(
                f"{self._url} offers no version of the API between v0.0.{documents.OLDEST} and "
                f"v0.0.{documents.NEWEST}, but {names}: load another data parser or OpenAPI plugin in slurmrestd"
            )
        return max(known)

    def _sent(self, method: str, path: str, **arguments: Any) -> Mapping[str, Any]:
        if (until := _expiry(self._token)) is not None and until < time.time():
            raise EngineAwayError(f"the token for {self._url} has expired: {_RENEW}")
        try:
            response = self._http.request(method, path, **arguments)
            if response.status_code in (401, 403, 511):
                raise EngineAwayError(f"{self._url} refuses the token or the user {self._options.rest_user}: {_RENEW}")
            answer = response.json()
            if isinstance(answer, dict) and answer.get("job_id"):
                return answer  # submitted, whatever it says of nodes that are away for now
            words = documents.problems_in(answer) if isinstance(answer, dict) else "no object"
            if words == _UNSPECIFIED:
                raise EngineAwayError(
                    f"{CONTROLLER_AWAY}; or the token of {self._options.rest_user} is no good: {_RENEW}"
                )
        except httpx.HTTPError as error:
            raise EngineAwayError(
                f"{self._url} does not answer: see that slurmrestd runs there ({type(error).__name__}: {error})"
            ) from error
        except ValueError as error:
            self._paths = frozenset()  # it may have been replaced by another version
            said = f"status {response.status_code}: {response.text[:200].strip()}"
            raise EngineAwayError(f"{self._url} is no slurmrestd, or a proxy answers for it with {said}") from error
        if "authentication" in words.lower():
            raise EngineAwayError(
                f"Slurm does not take the token of {self._options.rest_user}: {_RENEW}. Slurm: {words}"
            )
        if meaning := passing_problem(words):
            raise EngineAwayError(f"{meaning}. Slurm: {words}")
        if words:
            raise SlurmRefusedError(words)
        return dict(answer)


def _expiry(token: str) -> float | None:
    """When a token expires, as it says itself; None: it does not say."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return None
