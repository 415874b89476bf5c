"""How positions turn queries and keys, as a config.json says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.engine.architectures.family import FULL, INDEXED, SLIDING, Family
from trainmaster.engine.config_values import Values

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    theta: float
    kind: str = "default"
    """`default`, `linear`, `llama3`, `yarn` or `divided`."""
    factor: float = 1.0
    """Slows rotations down, so that a longer context rotates as far as the original one did."""
    original_positions: int = 0
    """The context length before it was extended, for `llama3` and `yarn`."""
    slow_turns: float = 1.0
    """Pairs with fewer turns within the original context are slowed by the whole factor."""
    fast_turns: float = 1.0
    whole_pairs: bool = True
    """Whether both bounds are rounded to whole pairs, for `yarn`."""
    magnitude: float = 1.0
    divisors: tuple[float, ...] = ()
    """Slow each pair down, for `divided`."""
    share: float = 1.0
    """The part of each head that is turned: its first elements."""
    interleaved: bool = False
    """A pair is two neighbours in a head, instead of two elements half a head apart."""


def read_ropes(values: Values, family: Family, head_dim: int) -> dict[str, Rope]:
    """The rope of each type of layer. transformers 5 writes rope_parameters, before it rope_theta and rope_scaling."""
    named: Mapping[str, Any] = values.raw.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = values.raw.get("rope_scaling") or {}
    given = {"rope_theta": values.number("rope_theta", family.rope_theta), **scaling}
    if not named and not scaling:
        given |= family.rope_unsaid
    if (said := values.raw.get(_PARTIAL)) is not None:
        given.setdefault(_PARTIAL, said)

    def rope(parameters: Mapping[str, Any]) -> Rope:
        return _rope(values, Values(parameters, values.path), family, head_dim)

    if family.local_rope_theta is None:
        return dict.fromkeys((FULL, SLIDING, INDEXED), rope({**given, **named}))
    local = {"rope_theta": values.number("rope_local_base_freq", family.local_rope_theta)}
    return {
        FULL: rope({**given, **(named.get(FULL) or {})}),
        SLIDING: rope({**local, **(named.get(SLIDING) or {})}),
    }


def _rope(values: Values, inner: Values, family: Family, head_dim: int) -> Rope:
    share = inner.number(_PARTIAL, family.rotary_share or 1.0)
    if family.rotary_share is None and share != 1.0:
        raise values.refuse(f"positions turn only a part of each head ({_PARTIAL})")
    width = int(head_dim * share)
    if width % 2 or width > head_dim:
        raise values.refuse(f"positions cannot turn {width} of the {head_dim} elements of a head ({_PARTIAL})")
    kind = str(inner.raw.get("rope_type", inner.raw.get("type", "default")))
    scaled = _scaled(values, inner, family.rope_names.get(kind, kind), width)
    return replace(scaled, share=share, interleaved=family.rope_interleaved)


def _scaled(values: Values, inner: Values, kind: str, width: int) -> Rope:
    theta = inner.number("rope_theta")
    # Dynamic scaling begins beyond max_position_embeddings, which no sequence passes here.
    if kind in ("default", "dynamic"):
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=inner.number("factor"))
    if kind not in _KINDS:
        known = f"{', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
        raise values.refuse(f"its rope scaling is of type {kind!r}; {known} are known")
    positions = values.count("max_position_embeddings")
    # The file's own word comes before that of its rope: transformers reads them so.
    outer = values if values.raw.get("original_max_position_embeddings") else inner
    original = outer.count("original_max_position_embeddings", positions)
    if kind == "longrope":
        factor = inner.number("factor", positions / original)
        stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return Rope(
            theta=theta,
            kind="divided",
            original_positions=original,
            divisors=inner.numbers("short_factor", width // 2),
            magnitude=inner.number("attention_factor", stretched),
        )
    if kind == "llama3":
        factor, slow, fast = (inner.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    else:
        factor = inner.number("factor", positions / original)
        slow, fast = inner.number("beta_slow", 1.0), inner.number("beta_fast", 32.0)
    if slow >= fast:
        raise values.refuse(
            f"rope: the low-frequency bound ({slow:g}) must be below the high-frequency bound ({fast:g})"
        )
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=original,
        slow_turns=slow,
        fast_turns=fast,
        whole_pairs=inner.flag("truncate", default=True),
        magnitude=_magnitude(inner, factor) if kind == "yarn" else 1.0,
    )


def _magnitude(yarn: Values, factor: float) -> float:
    """The value in the file, or what yarn's authors recommend for a factor."""
    given = yarn.optional("attention_factor")
    if given is not None:
        return given

    def best(weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(max(factor, 1.0))

    above, below = yarn.optional("mscale"), yarn.optional("mscale_all_dim")
    return best(above) / best(below) if above and below else best(1.0)
