from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tls_files import self_signed
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.settings.listener import check_listener, open_listener, url_of
from trainmaster.server.settings.settings import DEFAULT_RATE_LIMIT_PER_S, Settings


def settings(directory: Path, **changes: Any) -> Settings:
    return Settings(data_dir=directory, port=0, **changes)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_tls(tmp_path: Path, host: str) -> None:
    check_listener(settings(tmp_path, host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_any_other_address_needs_tls_or_a_proxy(tmp_path: Path, host: str) -> None:
    with pytest.raises(RefusedError, match=r"tls_cert.*behind_proxy"):
        check_listener(settings(tmp_path, host=host))
    check_listener(settings(tmp_path, host=host, behind_proxy=True))
    files = self_signed(tmp_path)
    check_listener(settings(tmp_path, host=host, tls_cert=files.cert, tls_key=files.key))


def test_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    files = self_signed(tmp_path)
    for changes in ({"tls_cert": files.cert}, {"tls_key": files.key}):
        with pytest.raises(RefusedError, match="belong together"):
            check_listener(settings(tmp_path, **changes))
    with pytest.raises(RefusedError, match=r"nothing\.pem"):
        check_listener(settings(tmp_path, tls_cert=tmp_path / "nothing.pem", tls_key=files.key))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(RefusedError, match="cannot be used"):
        check_listener(settings(tmp_path, tls_cert=files.cert, tls_key=self_signed(other).key))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])
def test_address_is_one_that_this_machine_reaches(tmp_path: Path, host: str, shown: str) -> None:
    chosen = settings(tmp_path, host=host)
    with open_listener(chosen) as listener:
        port = listener.getsockname()[1]
        assert url_of(chosen, listener) == f"http://{shown}:{port}"
        secured = settings(tmp_path, host=host, tls_cert=tmp_path, tls_key=tmp_path)
        assert url_of(secured, listener) == f"https://{shown}:{port}"
    with open_listener(chosen) as again:
        assert again.getsockname()[1] == port


def test_rate_is_limited_only_where_others_reach_the_server(tmp_path: Path) -> None:
    assert settings(tmp_path).rate_limit == 0
    assert settings(tmp_path, behind_proxy=True).rate_limit == DEFAULT_RATE_LIMIT_PER_S
    assert settings(tmp_path, host="0.0.0.0").rate_limit == DEFAULT_RATE_LIMIT_PER_S
    assert settings(tmp_path, host="0.0.0.0", rate_limit_per_s=0.0).rate_limit == 0
    assert settings(tmp_path, rate_limit_per_s=5.0).rate_limit == 5
