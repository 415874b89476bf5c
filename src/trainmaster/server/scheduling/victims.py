"""Victims of a preemption: the cheapest set of preemptible jobs that frees enough, overall and on one node."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from trainmaster.server.core.job import Job
from trainmaster.server.scheduling.placement import FreeAmounts, members, plus
from trainmaster.server.scheduling.pool import Demand

EXACT = 12
"""Up to so many jobs every subset is considered."""

Cost = tuple[int, float, int, int]
"""The highest priority, GPU-seconds of work that is lost, jobs, GPUs."""


@dataclass(frozen=True, slots=True, eq=False)
class Victim:
    job: Job
    loss: float
    """GPU-seconds."""
    gpus: int


def cost_of(victims: Collection[Victim]) -> Cost:
    highest, loss, gpus = -1, 0.0, 0
    for each in victims:
        highest = max(highest, each.job.priority)
        loss += each.loss
        gpus += each.gpus
    return highest, loss, len(victims), gpus


def least_cost(victims: Sequence[Victim], priority: int, gpus: int) -> Cost | None:
    """What so many GPUs of those with a lower priority cost at least, the cheapest first; None if they have too few."""
    able = [each for each in victims if each.job.priority < priority]
    for highest in sorted({each.job.priority for each in able}):
        allowed = [each for each in able if each.job.priority <= highest]
        given = [each.gpus for each in allowed]
        if sum(given) >= gpus:
            most = max(given)
            count = -(-gpus // most) if gpus > 0 and most else 1
            return highest, sum(each.loss for each in allowed[:count]), count, max(0, gpus)
    return None


def cheapest(
    victims: Iterable[Victim],
    enough: Callable[[Collection[Victim]], bool],
    missing: Callable[[Collection[Victim]], int] = lambda _: 1,
) -> list[Victim] | None:
    """The cheapest set that is enough, where a larger set is never less than enough; None when all are not. `missing`
    says how many more a set needs at least. All that are given count as equal in priority."""
    order = sorted(victims, key=lambda each: (each.loss, each.gpus, each.job.job_id))
    if len(order) > EXACT:
        count = bisect_left(range(len(order) + 1), True, key=lambda some: enough(set(order[:some])))
        return spared(order[:count], enough) if count <= len(order) else None
    best: tuple[tuple[float, ...], list[Victim]] | None = None

    def search(chosen: list[Victim], at: int) -> None:
        nonlocal best
        _, loss, count, gpus = cost_of(chosen)
        if best is not None and (loss, count, gpus) >= best[0]:
            return
        if enough(chosen):
            best = ((loss, count, gpus), chosen)
            return
        rest, more = order[at:], missing(chosen)
        if len(rest) < more or not enough([*chosen, *rest]):
            return
        least_loss = loss + sum(each.loss for each in rest[:more])
        least = (least_loss, count + more, gpus + more * min(each.gpus for each in rest))
        if best is not None and least >= best[0]:
            return
        for index in range(at, len(order)):
            search([*chosen, order[index]], index + 1)

    search([], 0)
    return best[1] if best else None


def spared(chosen: Sequence[Victim], enough: Callable[[Collection[Victim]], bool]) -> list[Victim]:
    """A set that is enough, without those that are not needed; the most expensive are left out first."""
    kept = sorted(chosen, key=lambda each: (each.job.priority, each.loss, each.gpus, each.job.job_id), reverse=True)
    for each in list(kept):
        without = [other for other in kept if other is not each]
        if enough(without):
            kept = without
    return kept


def with_gpus(chosen: Collection[Victim], others: Iterable[Victim], gpus: int) -> list[Victim]:
    """`chosen`, with the cheapest others added until so many GPUs are given back."""
    more = list(chosen)
    have = sum(each.gpus for each in chosen)
    for each in sorted(others, key=lambda each: (each.loss / max(1, each.gpus), each.job.job_id)):
        if have >= gpus:
            break
        if each not in chosen and each.gpus:
            more.append(each)
            have += each.gpus
    return more


class Site:
    """A node: what of it is within reach, and what each victim would add."""

    def __init__(self, node_id: str, demand: Demand, victims: list[Victim]) -> None:
        self.node_id = node_id
        self.limits: list[tuple[FreeAmounts, dict[Victim, FreeAmounts]]] = []
        self._demand = demand
        self._victims = victims

    def members(self, gone: Collection[Victim]) -> int:
        """How many nodes of the gang it holds once these are gone."""
        fewest = self._demand.count
        for base, gives in self.limits:
            have = base
            for each, given in gives.items():
                if each in gone:
                    have = plus(have, given)
            fewest = min(fewest, members(self._demand.needs, self._demand.gpus, *have))
        return fewest

    def cheapest(self, gone: Collection[Victim], target: int) -> list[Victim] | None:
        """The cheapest set that lets it hold `target` nodes of the gang, beside those in `gone`."""
        rest = [each for each in self._victims if each not in gone]
        for highest in sorted({each.job.priority for each in rest}):
            allowed = [each for each in rest if each.job.priority <= highest]
            if self.members([*gone, *allowed]) >= target:
                break
        else:
            return None
        base, gives = self.limits[0]
        short = target * self._demand.gpus - base[0] - sum(gives[each][0] for each in gives if each in gone)
        most = max((gives[each][0] for each in allowed if each in gives), default=0)

        def missing(chosen: Collection[Victim]) -> int:
            left = short - sum(gives[each][0] for each in chosen if each in gives)
            return -(-left // most) if most and left > 0 else 1

        return cheapest(allowed, lambda chosen: self.members([*gone, *chosen]) >= target, missing)


def have_room(sites: Iterable[Site], count: int, gone: Collection[Victim]) -> bool:
    return any(have >= count for have in accumulate(site.members(gone) for site in sites))
