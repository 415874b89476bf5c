"""What is said of an API server that cannot be reached, with what to look at."""

from __future__ import annotations

import httpx
import pytest
import yaml

from trainmaster.backends.cluster.engine import EngineAwayError
from trainmaster.backends.kubernetes.connection import KubernetesConnection, words_of
from trainmaster.backends.kubernetes.options import KubernetesOptions


def kubeconfig(server: str) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kubeconfig": "/nowhere"}, "the kubeconfig cannot be used: there is no file /nowhere on the server"),
        ({"kubeconfig_content": kubeconfig("http://127.0.0.1:9"), "context": "y"}, "see the options kubeconfig"),
        (
            {"kubeconfig_content": kubeconfig("http://127.0.0.1:9")},
            "is the cluster up, and the address in the kubeconf",
        ),
    ],
)
def test_what_is_wrong_with_the_credentials_or_the_address_is_said(options: dict[str, str], told: str) -> None:
    connection = KubernetesConnection(KubernetesOptions.model_validate(options))
    with pytest.raises(EngineAwayError) as away:
        connection.get("/version")
    assert told in str(away.value)


def test_a_certificate_of_an_unknown_authority_leads_to_the_kubeconfig() -> None:
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    assert words_of(error, "https://k8s").endswith("the authority of the cluster (certificate-authority-data)")
    assert words_of(httpx.ReadTimeout("timed out"), "https://k8s") == "https://k8s: ReadTimeout: timed out"
