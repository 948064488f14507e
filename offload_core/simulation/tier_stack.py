"""Several simulated tiers above each other: the best one serves, and objects move between them as on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from offload_core.planning.planner import PrefixDepth
from offload_core.planning.write_policy import WritePolicy
from offload_core.simulation.bounded_tier import BoundedTier, Traffic


@dataclass
class TierCounts:
    """The hit tokens of a tier, and its traffic."""

    traffic: Traffic
    hit_tokens: int = 0


@dataclass
class StackedTier:
    """One tier and its keys in a configuration.

    Args:
        objects: its objects, with their limit.
        policy: its write policy, with the uses until now.
        promote: whether it takes objects that a slower tier has served.
    """

    objects: BoundedTier
    name: str = "tier"
    policy: WritePolicy = field(default_factory=lambda: WritePolicy("every"))
    promote: bool = True
    load_weight: float = 1.0
    counts: TierCounts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = TierCounts(self.objects.traffic)


class TierStack:
    """Tiers, the fastest first.

    The tier with the highest matched tokens times weight serves, as with ``load_when: always``. A trace has no times of
    loads, so the simulation cannot compare seconds.
    """

    def __init__(self, tiers: Sequence[StackedTier]) -> None:
        self.tiers = tuple(tiers)
        self.holds = self.tiers[0].objects.holds if len(self.tiers) == 1 else self._any_holds
        """Return whether some tier has an object."""

    @classmethod
    def of_one(cls, objects: BoundedTier) -> TierStack:
        """Return a single tier that stores everything it is offered."""
        return cls([StackedTier(objects)])

    def search(self, search_one: Callable[[Callable[[int], bool]], PrefixDepth]) -> tuple[StackedTier, PrefixDepth]:
        """Return the tier that serves, with its depth, and the depth of attention on any tier.

        Args:
            search_one: searches among objects; gets a function that tells whether an object is present.
        """
        found = [search_one(tier.objects.holds) for tier in self.tiers]
        places = range(len(found))
        best = max(places, key=lambda place: found[place].usable_tokens * self.tiers[place].load_weight)
        attention_tokens = max(depth.attention_tokens for depth in found)
        return self.tiers[best], PrefixDepth(found[best].usable_tokens, attention_tokens)

    def load(self, source: StackedTier, names: Sequence[int], size: int) -> None:
        """Load objects of one size from a tier, and offer them to the others."""
        source.objects.load(names, size)
        for name in names:
            for tier in self._willing_after_load(source, name):
                _store(tier, name, size, spare=False)

    def store(self, name: int, size: int, *, spare: bool) -> None:
        """Offer an object that no tier has to all tiers."""
        for tier in self.tiers:
            if tier.policy.takes_offered(name):
                _store(tier, name, size, spare=spare)

    def touch(self, names: Iterable[tuple[int, bool]]) -> None:
        """Touch objects on every tier, in order. A flag tells whether an object is spare from now on."""
        for name, spare in names:
            for tier in self.tiers:
                tier.objects.touch(name, spare=spare)

    def _any_holds(self, name: int) -> bool:
        return any(tier.objects.holds(name) for tier in self.tiers)

    def _willing_after_load(self, source: StackedTier, name: int) -> Iterator[StackedTier]:
        faster = True
        for tier in self.tiers:
            if tier is source:
                faster = False
            elif tier.policy.takes_loaded(name, promoted=faster) and (tier.promote or not faster):
                yield tier


def _store(tier: StackedTier, name: int, size: int, *, spare: bool) -> None:
    if not tier.objects.holds(name):
        tier.objects.store(name, size, spare=spare)
    if tier.objects.holds(name):
        tier.policy.has_stored(name)
