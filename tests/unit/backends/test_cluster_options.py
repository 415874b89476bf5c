"""What is wrong with the options of a cluster is said by name, with what the option is for."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.backends.cluster.kinds import WrongOptionsError, cluster_capabilities, parse_options


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "address: is required. Where the dashboard of the cluster answers, such as `http://ray-head:8265`."),
        ({"address": "ray-head:8265"}, "address: is written differently. Where the dashboard of the cluster answers"),
        ({"address": "http://a", "poll": 1}, "poll: there is no such option; there are: address, ca_file"),
        ({"address": "http://a", "poll_s": "often"}, "poll_s: Input should be a valid number"),
    ],
)
def test_wrong_option_is_named_and_explained(given: dict[str, Any], told: str) -> None:
    with pytest.raises(WrongOptionsError) as wrong:
        parse_options("ray", given)
    assert str(wrong.value).startswith(told)


def test_unknown_kind_names_those_that_there_are() -> None:
    with pytest.raises(WrongOptionsError, match="there is no kind 'k8s' of cluster; there are: slurm, ray, kubernetes"):
        parse_options("k8s", {})


@pytest.mark.parametrize(
    ("kind", "given", "apart"),
    [
        ("slurm", {}, True),
        ("ray", {"address": "http://a"}, True),
        ("ray", {"address": "http://a", "placement": "SPREAD"}, False),
        ("ray", {"address": "http://a", "placement": "PACK"}, False),
        ("ray", {"address": "http://a", "placement": "STRICT_PACK"}, False),
        ("kubernetes", {}, False),
    ],
)
def test_kinds_say_whether_every_node_of_a_job_needs_another_node_of_the_cluster(
    kind: str, given: dict[str, Any], apart: bool
) -> None:
    assert cluster_capabilities(kind, parse_options(kind, given)).job_nodes_apart is apart
