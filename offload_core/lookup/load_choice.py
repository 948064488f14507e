"""The choice to load or to compute, and of the tier: by expected seconds to the first token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from offload_core.config.model import LoadPolicy
from offload_core.lookup.estimates.load_seconds import LoadSeconds
from offload_core.lookup.estimates.prefill_seconds import PrefillSeconds
from offload_core.lookup.prefix_query import PrefixQuery
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.tiers.tier import Tier


class LoadChoice:
    """The worth of a load. For the engine thread.

    With ``always``, it is the number of matched tokens times ``load_weight``. With ``cheaper``, it is the number of
    saved seconds times ``load_weight``. Saved is the prefill without the load, less the load, less the prefill of the
    rest. A load that is expected to miss its deadline saves nothing. Before the engine's first prefill, every
    load pays. A tier's first load is expected to take no time.

    Of one tier's boundaries only the deepest is considered. With seconds that grow linearly with the bytes, no other is
    better: a deeper boundary adds bytes at a constant or falling rate, and a token costs the more prefill the deeper it
    is. Where seconds grow in stairs, another one may be a little better. Chunked local attention is the exception. Its
    bytes are least at the end of an attention chunk, which is considered too, if no other kind of pack depends on the
    boundary.

    Args:
        step_tokens: most tokens that the engine computes in one step.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: LoadPolicy,
        planner: HybridOffloadPlanner,
        tiers: Sequence[Tier],
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._planner = planner
        self._tiers = {tier.name: tier for tier in tiers}
        self._loads = {tier.name: LoadSeconds(clock) for tier in tiers}
        self.prefill = PrefillSeconds(step_tokens, clock)
        self.object_bytes: Mapping[str, int] = {}
        """Bytes of one object of each pack, as far as they are known."""
        kinds = {pack.policy.kind for pack in planner.packs}
        self._attention_chunk_tokens = 0
        if "chunked" in kinds and kinds <= {"full", "chunked"}:
            self._attention_chunk_tokens = math.lcm(*(p.policy.attention_chunk_tokens or 1 for p in planner.packs))

    def tiers_to_ask(self, query: PrefixQuery) -> dict[str, float]:
        """Return the tiers from which the deepest possible prefix would be worth its lookup.

        Each comes with the seconds that this prefix would save. A longer wait for the lookup cannot pay.
        """
        if self._policy == "always":
            return dict.fromkeys(self._loads, math.inf)
        reachable = self._planner.reachable_prefix(query.limit_tokens)
        saved = {name: self._saved_seconds(name, query, reachable) for name in self._loads}
        return {name: seconds for name, seconds in saved.items() if seconds > self._loads[name].lookup_seconds()}

    def boundary(self, tier: str, query: PrefixQuery, boundary_tokens: int) -> int:
        """Return the boundary to load to, of those that the tier has up to ``boundary_tokens``."""
        if self._policy == "cheaper" and self._attention_chunk_tokens:
            shallower = boundary_tokens - boundary_tokens % self._attention_chunk_tokens
            if shallower > query.computed_tokens and self.worth(tier, query, shallower) > self.worth(
                tier, query, boundary_tokens
            ):
                return shallower
        return boundary_tokens

    def worth(self, tier: str, query: PrefixQuery, boundary_tokens: int) -> float:
        """Return the worth of a load to a boundary. At most zero: the load does not pay."""
        if boundary_tokens <= query.computed_tokens:
            return 0.0
        if self._policy == "always":
            return (boundary_tokens - query.computed_tokens) * self._tiers[tier].load_weight
        saved = self._saved_seconds(tier, query, boundary_tokens)
        if saved == math.inf:  # no prefill was measured yet
            saved = boundary_tokens - query.computed_tokens
        return saved * self._tiers[tier].load_weight

    def load_begins(self, tier: str, job_id: int, computed_tokens: int, boundary_tokens: int) -> None:
        """Note the begin of a load."""
        self._loads[tier].load_begins(job_id, self._bytes(computed_tokens, boundary_tokens))

    def load_ends(self, tier: str, job_id: int, *, measured: bool) -> float:
        """Note the end of a load; returns its seconds. See :meth:`LoadSeconds.load_ends`."""
        return self._loads[tier].load_ends(job_id, measured=measured)

    def lookup_ended(self, tier: str, seconds: float, *, answered: bool) -> None:
        """Note the seconds of a lookup on a tier. See :meth:`LoadSeconds.lookup_ended`."""
        self._loads[tier].lookup_ended(seconds, answered=answered)

    def prefill_seconds_saved(self, computed_tokens: int, boundary_tokens: int, tokens: int) -> float:
        """Return the seconds of prefill that a load saves a prompt of ``tokens``; infinity if not measured yet."""
        without = self.prefill.seconds(computed_tokens, tokens)
        rest = self.prefill.seconds(boundary_tokens, tokens)
        return math.inf if without is None or rest is None else without - rest

    def _saved_seconds(self, tier: str, query: PrefixQuery, boundary_tokens: int) -> float:
        """Return the seconds that a load would save; infinity before the first prefill was measured."""
        tokens = max(query.total_tokens, query.limit_tokens + 1)
        prefill = self.prefill_seconds_saved(query.computed_tokens, boundary_tokens, tokens)
        if prefill == math.inf:
            return math.inf
        nbytes = self._bytes(query.computed_tokens, boundary_tokens, query.local_attention_tokens)
        load = self._loads[tier].seconds(nbytes)
        return prefill - load if load < self._tiers[tier].limits.load_seconds(nbytes) else -math.inf

    def _bytes(self, computed_tokens: int, boundary_tokens: int, local_attention_tokens: int = 0) -> int:
        """Return the bytes of a load.

        Args:
            local_attention_tokens: prefix whose full attention needs no load, but for the last unit before a boundary.
        """
        nbytes = 0
        for pack in self._planner.all_packs:
            begin = computed_tokens
            if pack.policy.kind == "full":
                begin = max(begin, min(local_attention_tokens, boundary_tokens - pack.unit_tokens))
            nbytes += len(pack.needed_units(begin, boundary_tokens)) * self.object_bytes.get(pack.name, 0)
        return nbytes
