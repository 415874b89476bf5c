"""The page of the backends' tables: `docs/reference/backends.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from trainmaster.backends import BACKENDS, CLUSTER_KINDS
from trainmaster.backends.base import Capabilities, ImageFeature, PlacementBy
from trainmaster.backends.cluster.engine import ClusterOptions
from trainmaster.backends.cluster.kinds import options_model, secret_names
from trainmaster.protocol.launch import Lifetime

INTRODUCTION = """\
# Backends

This page lists what each backend can do, and the options of clusters. `make docs` generates it from
`trainmaster.backends`. A job that needs what its backend lacks is refused at submission, with the reason.

## What each backend can do
"""
OPTIONS = """
## Options of clusters

`trainmaster backends add NAME --kind KIND --set OPTION=VALUE` declares a cluster, and so does a table of the settings
file:

```toml
[clusters.NAME]
kind = "slurm"
partition = "gpu"
```

Every cluster has these options:
"""


def backends_page() -> str:
    """Capabilities, and a row for every option."""
    every = {**{name: each.capabilities for name, each in BACKENDS.items()}}
    every |= {f"{name} (cluster)": each.capabilities for name, each in CLUSTER_KINDS.items()}
    lines = [INTRODUCTION, f"| | {' | '.join(every)} |", "|---" * (len(every) + 1) + "|"]
    lines += [f"| {what} | {' | '.join(cells)} |" for what, cells in _abilities(list(every.values()))]
    lines += [OPTIONS, *_options(ClusterOptions, frozenset())]
    for kind in CLUSTER_KINDS:
        lines += ["", f"Clusters of kind `{kind}` also have:", "", *_options(options_model(kind), secret_names(kind))]
    return "\n".join(lines) + "\n"


def _abilities(every: list[Capabilities]) -> Iterator[tuple[str, list[str]]]:
    def cells(of: Any) -> list[str]:
        return [value if isinstance(value := of(each), str) else "yes" if value else "–" for each in every]

    yield "who chooses nodes", cells(lambda each: "Trainmaster" if each.placement is PlacementBy.US else "the engine")
    yield "batch jobs", cells(lambda each: Lifetime.BATCH in each.lifetimes)
    yield "services, trainer services", cells(lambda each: Lifetime.SERVICE in each.lifetimes)
    yield "jobs see the server's files", cells(lambda each: each.runs_here)
    yield "images", cells(lambda each: each.images)
    yield "volumes", cells(lambda each: each.images and ImageFeature.VOLUMES in each.image_features)
    yield (
        "accounts are separated",
        cells(lambda each: each.isolates_accounts or ("by system users" if each.runs_here else False)),
    )
    names = [", ".join(f"`{field}`" for field in sorted(each.cannot_choose_by)) or "–" for each in every]
    yield "fields of `resource_config` by which it cannot choose nodes", names


def _options(model: type[ClusterOptions], secrets: frozenset[str]) -> Iterator[str]:
    own = model.model_fields.keys() - (ClusterOptions.model_fields.keys() if model is not ClusterOptions else set())
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        if name not in own:
            continue
        default = "required" if field.is_required() else "" if field.default in ("", (), None) else f"`{field.default}`"
        meaning = (field.description or "").replace("|", "\\|")
        told = ", ".join(map(str, get_args(field.annotation))) if _is_choice(field.annotation) else ""
        secret = " Stored encrypted, and never shown." if name in secrets else ""
        if told:
            meaning += f" One of: {told}."
        yield f"| `{name}` | {'' if name in secrets else default} | {meaning}{secret} |"


def _is_choice(annotation: Any) -> bool:
    return all(isinstance(each, str) for each in get_args(annotation)) and bool(get_args(annotation))
