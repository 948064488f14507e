"""Backfill: where the engine holds full attention deeper than recurrent states, a load brings only the states.

An engine evicts a request's states before its attention. Then it can go on only from an earlier state, or from none,
although most of the bytes are still there. A connector can let vLLM report the depth of attention in place of the depth
of both. The load then begins at that depth and brings the state at its end. Two more rules of vLLM matter:

- A load has at least one block of every group. So if the state belongs at a depth that local attention covers, the
  engine first forgets the last block of attention before it. That block is loaded with the state.
- vLLM asks the connector for its choice before it looks at a request, and does not name the request. So the choice is
  "both", except between the decision to backfill a request and the next question about it. Other requests that are
  asked in between may get the depth of attention too. They get no load that begins there unless it brings a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.vllm.scheduler.local_cache import LocalCache, LocalPrefix, has_only_attention_and_states
from offload_core.vllm.scheduler.request_state import Offer, RequestState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_MAX_UNANSWERED = 2
_PATIENCE_STEPS = 8


class Backfill:
    """Decides where loads begin. All methods run on the engine thread.

    It does nothing until :meth:`bind` is called.
    """

    def __init__(self, planner: HybridOffloadPlanner) -> None:
        self._planner = planner
        self._cache: LocalCache | None = None
        self._expected: dict[str, int] = {}
        """Requests whose next question should be about attention alone, and the steps until others matter more."""

    def bind(self, block_pool: BlockPool) -> None:
        """Use the engine's block pool, if the model has only full attention and recurrent states."""
        if has_only_attention_and_states(self._planner):
            self._cache = LocalCache(block_pool, self._planner)

    @property
    def expects_attention_alone(self) -> bool:
        """True if the engine should report the depth of attention in the next question."""
        return bool(self._expected)

    def local_prefix(self, state: RequestState, computed_tokens: int) -> LocalPrefix:
        """Return the prefix that the engine holds for a request.

        Args:
            computed_tokens: the prefix in the engine's question.
        """
        if self._cache is None:
            return LocalPrefix(computed_tokens, computed_tokens)
        local = self._cache.prefix(state.request, computed_tokens)
        if state.unanswered_backfills >= _MAX_UNANSWERED:
            return LocalPrefix(local.computed_tokens, local.computed_tokens)
        return local

    def begin_of_load(self, state: RequestState, local: LocalPrefix, boundary_tokens: int) -> int:
        """Return the depth in tokens at which the load to a boundary begins; prepare the local cache for it.

        It is ``local.computed_tokens`` for a load as without backfill, which is the choice if both load the same.
        """
        if self._cache is None or boundary_tokens <= local.computed_tokens:
            return local.computed_tokens
        begin = min(local.attention_tokens, boundary_tokens - self._planner.hash_block_size)
        if self._objects(begin, boundary_tokens) >= self._objects(local.computed_tokens, boundary_tokens):
            return local.computed_tokens
        if begin < local.attention_tokens:
            self._cache.forget_attention(state.request, boundary_tokens)
        return begin

    def expect(self, state: RequestState, offer: Offer) -> None:
        """Note that a request's offer waits for a question from its own beginning."""
        if offer.backfill:
            self._expected[state.request.request_id] = _PATIENCE_STEPS

    def is_expected(self, state: RequestState, computed_tokens: int) -> bool:
        """Return whether a question about a request is the expected one; from now on, none is expected.

        After a few questions that came from another depth, the request gets no backfill.
        """
        if self._expected.pop(state.request.request_id, None) is None or state.offer is None:
            return False
        if state.offer.computed_tokens == computed_tokens:
            return True
        state.unanswered_backfills += 1
        return False

    def end_step(self) -> None:
        """End an engine step. A request that the engine does not ask about for some steps holds up no other."""
        if not self._expected:
            return
        self._expected = {request_id: steps - 1 for request_id, steps in self._expected.items() if steps > 1}

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._expected.pop(request_id, None)

    def _objects(self, computed_tokens: int, boundary_tokens: int) -> int:
        return sum(len(pack.needed_units(computed_tokens, boundary_tokens)) for pack in self._planner.packs)
