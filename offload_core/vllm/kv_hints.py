"""vLLM's KV hints: an orchestrator's actions on the prefix of a request, and the answer to them.

vLLM attaches an envelope to one request (``Request.kv_hints``, from 0.32 on). Its HTTP server takes none yet, so a
request may also carry an envelope in ``kv_transfer_params``. The answer goes back in ``kv_transfer_params`` of the
request's output. It has a key of its own, since some proxies send these parameters on with the next request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from offload_core.config.model import OffloadConfig
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.lookup.hints.envelope import (
    Action,
    DemotePayload,
    Envelope,
    PrefixPayload,
    RetainPayload,
    read_envelope,
)
from offload_core.lookup.hints.prefetches import Prefetches
from offload_core.lookup.hints.retentions import Retentions, TouchRounds
from offload_core.lookup.prefix_query import PrefixQuery
from offload_core.lookup.service import LookupService
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.metrics import ALL_TIERS, Counters
from offload_core.tiers.tier import Tier
from offload_core.vllm.metadata import ChunkTouch, Prefetch, StepReport
from offload_core.vllm.scheduler.placement_plan import PlacementPlan
from offload_core.vllm.scheduler.request_options import REQUEST_KEY
from offload_core.vllm.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request

_AT_BEGIN = frozenset({"kv.retain", "kv.pin", "kv.unpin"})
"""The actions that count from the begin of their request, the others at its end."""
ANSWER_KEY = "hybrid_offload_hints"
"""The key of the answer in ``kv_transfer_params``."""
RETAINED_SHARE = 0.5
"""Part of the smallest tier's capacity that the hints of all tenants together may protect."""
_SHARE_BETWEEN_ROUNDS = 0.125
"""Part of the smallest tier's capacity that this engine stores, loads or touches between two rounds of touches. The
unprotected half of the tier is several times that. So a protected chunk becomes the oldest one only if one step renews
very much."""
_ANSWERED_REQUEST = "_hybrid_offload_answer"


class KvHints:
    """Acts on the hints of requests. All methods run on the engine thread, and none waits for storage.

    Args:
        tiers: the tiers that the scheduler half has opened.
        ranks_namespaces: returns the namespace of each rank's keys, for an adapter's digest.
        loads: whether this engine loads.
    """

    def __init__(
        self,
        config: OffloadConfig,
        planner: HybridOffloadPlanner,
        tiers: Sequence[Tier],
        lookups: LookupService,
        placement: PlacementPlan,
        ledger: ChunkLedger,
        ranks_namespaces: Callable[[str], tuple[str, ...]],
        counters: Counters,
        *,
        loads: bool,
    ) -> None:
        self._planner = planner
        self._placement = placement
        self._ledger = ledger
        self._ranks_namespaces = ranks_namespaces
        self._counters = counters
        self._ordered = any(tier.capabilities.spares for tier in tiers)
        ordered = {tier.name for tier in tiers if tier.capabilities.spares}
        capacities = [tier.capacity_bytes or math.inf for tier in config.tiers if tier.common.name in ordered]
        capacity = min(capacities, default=math.inf)
        share = config.settings.retained_share_per_tenant
        self._retentions = Retentions(share * capacity if share else 0.0, RETAINED_SHARE * capacity)
        self._rounds = TouchRounds(self._retentions, _SHARE_BETWEEN_ROUNDS * capacity)
        self._prefetches = Prefetches(config, planner, lookups, ledger.num_ranks, loads=loads)
        self._chunk_bytes: Mapping[str, int] = {}
        self._shown_bytes = 0

    def set_object_bytes(self, object_bytes: Mapping[str, int]) -> None:
        """Take the bytes of one object of one rank, by the name of its pack."""
        self._prefetches.object_bytes = object_bytes
        self._chunk_bytes = {pack: nbytes * self._ledger.num_ranks for pack, nbytes in object_bytes.items()}
        self._retentions.chunk_bytes = self._chunk_bytes

    @property
    def is_active(self) -> bool:
        """True if an idle engine should step on for prefetches."""
        return self._prefetches.is_active

    def begin(self, state: RequestState) -> None:
        """Read the hints of a new request, and protect its prefix at once if they ask for that."""
        state.hints = _envelopes(state.request)
        if state.has_names:
            for action in _actions(state.hints):
                if action.action_type in _AT_BEGIN:
                    self._act(state, action)

    def ended(self, state: RequestState) -> list[dict[str, Any]] | None:
        """Act on the other hints of a request that has ended, and return its answer, if it had hints."""
        if not state.hints:
            return None
        for action in _actions(state.hints):
            if state.has_names:
                self._act(state, action)
            elif action.status is None:
                action.refuse("the files of the request's adapter could not be read, so its chunks have no names")
        return self._answer(state.hints)

    def refused(self, request: Request) -> list[dict[str, Any]] | None:
        """Return the answer for a request that is not followed, if it had hints."""
        envelopes = _envelopes(request)
        for action in _actions(envelopes):
            if action.status is None:
                action.refuse(
                    "the request was not followed: its options or those of the engine exclude loads and stores, or "
                    "the engine was reset"
                )
        return self._answer(envelopes) if envelopes else None

    def take_step(self, renewed: Iterable[ChunkRef], *, idle: bool) -> tuple[list[ChunkTouch], list[Prefetch]]:
        """Return the touches before the stores of this step, and the prefetches that begin with it.

        Args:
            renewed: the chunks that this step stores, loads or touches. They become more recent than protected chunks.
        """
        if not (self._prefetches.is_active or self._retentions or self._shown_bytes):  # nothing to do
            return [], []
        batch = self._prefetches.take(idle=idle) if self._prefetches.is_active else None
        touches: list[ChunkTouch] = []
        if self._retentions:
            moved = chain(renewed, batch.chunks if batch is not None else ())
            nbytes = sum(self._chunk_bytes.get(ref.pack, 0) for ref in moved)
            touches = [ChunkTouch(ref, spare=False) for ref in self._rounds.take(nbytes)]
        if self._retentions.nbytes != self._shown_bytes:
            self._counters.add("retained_bytes", ALL_TIERS, self._retentions.nbytes - self._shown_bytes)
            self._shown_bytes = self._retentions.nbytes
        if batch is None:
            return touches, []
        return touches, [Prefetch(batch.job_id, batch.tier, batch.chunks, batch.last)]

    def protected(self, touches: list[ChunkTouch]) -> list[ChunkTouch]:
        """Return the touches, without making a protected chunk spare."""
        if not self._retentions:
            return touches
        return [
            touch._replace(spare=False) if touch.spare and self._retentions.protects(touch.chunk) else touch
            for touch in touches
        ]

    def reported(self, report: StepReport) -> None:
        """Take the workers' report on prefetches."""
        if report.prefetches_ended:
            self._prefetches.ended(report.prefetches_ended, report.prefetches_failed)

    def reset(self) -> None:
        """Forget everything. The names of chunks change."""
        self._retentions.clear()
        self._rounds.clear()
        self._prefetches.clear()

    def _act(self, state: RequestState, action: Action) -> None:
        """Act on an action that has no answer yet, and answer it."""
        if action.status is not None:
            return
        if isinstance(action.payload, DemotePayload):
            self._demote(state, action, action.payload)
        elif action.action_type == "kv.prefetch":
            self._prefetch(state, action)
        elif action.action_type == "kv.unpin":
            self._unpin(state, action)
        else:
            self._retain(state, action)

    def _retain(self, state: RequestState, action: Action) -> None:
        assert isinstance(action.payload, PrefixPayload)
        if not self._ordered:
            action.refuse("no tier of this engine has an order of eviction that hints could change")
            return
        boundary = self._prompt_boundary(state, action)
        if not boundary:
            return
        seconds = action.payload.seconds if isinstance(action.payload, RetainPayload) else math.inf
        refs = [state.ref(touch.pack, touch.unit) for touch in state.path.refreshing_touches(boundary)]
        name = self._names(state, boundary)[-1]
        refusal = self._retentions.add(_tenant(state), name, refs, time.monotonic() + seconds)
        if refusal is not None:
            action.refuse(refusal)
            return
        state.path.add_junction(boundary)  # so that its windows and states are kept as they are stored
        self._rounds.added(refs)
        action.accept(boundary)

    def _unpin(self, state: RequestState, action: Action) -> None:
        assert isinstance(action.payload, PrefixPayload)
        tokens = min(action.payload.tokens or state.request.num_prompt_tokens, state.request.num_prompt_tokens)
        names = self._names(state, tokens)
        if self._retentions.remove(_tenant(state), names):
            action.accept(len(names) * self._planner.boundary_tokens)
        else:
            action.refuse(f"no hint of this tenant protects a prefix of the first {tokens} tokens")

    def _prefetch(self, state: RequestState, action: Action) -> None:
        assert isinstance(action.payload, PrefixPayload)
        request = state.request
        hashes = request.block_hashes
        tokens = min(action.payload.tokens or request.num_tokens, self._planner.named_tokens(len(hashes)))
        boundary = self._planner.reachable_prefix(tokens)
        if not boundary:
            action.refuse(self._too_short())
            return
        adapter = state.adapter.digest if state.adapter else ""
        query = PrefixQuery(
            hashes=self._planner.chunk_hashes(hashes),
            namespaces=self._ranks_namespaces(adapter),
            computed_tokens=0,
            limit_tokens=boundary,
            total_tokens=request.num_tokens,
            adapter=adapter,
            excluded=self._ledger.excluded,
        )
        refusal = self._prefetches.add(_tenant(state), query)
        if refusal is None:
            action.accept(boundary)
        else:
            action.refuse(refusal)

    def _demote(self, state: RequestState, action: Action, payload: DemotePayload) -> None:
        end = self._planner.named_tokens(len(state.request.block_hashes))
        if not self._ordered:
            action.refuse("no tier of this engine has an order of eviction that hints could change")
        elif self._planner.storable_prefix(end) <= payload.from_tokens:
            action.refuse(f"the request has no chunk behind its first {payload.from_tokens} tokens")
        else:
            state.demoted_from = payload.from_tokens
            action.accept(self._planner.storable_prefix(end))

    def _prompt_boundary(self, state: RequestState, action: Action) -> int:
        """Return the boundary of the prompt that an action is about; refuse the action if there is none."""
        assert isinstance(action.payload, PrefixPayload)
        tokens = action.payload.tokens or state.path.replay_tokens
        named = self._planner.named_tokens(len(state.request.block_hashes))
        boundary = self._planner.storable_prefix(min(tokens, named, state.request.num_prompt_tokens))
        if not boundary:
            action.refuse(self._too_short())
        return boundary

    def _too_short(self) -> str:
        return f"the prefix is shorter than one chunk of {self._planner.boundary_tokens} tokens"

    def _names(self, state: RequestState, tokens: int) -> list[tuple[str, bytes]]:
        """Return the names of the prefixes that end at the boundaries up to ``tokens``."""
        adapter = state.adapter.digest if state.adapter else ""
        return [(adapter, name) for name in self._placement.boundary_names(state, tokens)]

    def _answer(self, envelopes: Sequence[Envelope]) -> list[dict[str, Any]]:
        for action in _actions(envelopes):
            self._counters.add("hints_accepted" if action.status == "accepted" else "hints_refused", ALL_TIERS)
        self._counters.add("hints_refused", ALL_TIERS, sum(bool(envelope.reason) for envelope in envelopes))
        return [envelope.answer() for envelope in envelopes]


def transfer_params(request: Request, answer: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the parameters of a request's output that carry an answer.

    Beside other connectors, vLLM takes each key from one connector only. So a second connector of ours adds the actions
    that it accepts to the answer of the first one.
    """
    if answer is None:
        return None
    first: list[dict[str, Any]] | None = getattr(request, _ANSWERED_REQUEST, None)
    if first is None:
        setattr(request, _ANSWERED_REQUEST, answer)
        return {ANSWER_KEY: answer}
    for mine, other in zip(first, answer, strict=True):
        actions = mine.get("actions", [])
        for place, action in enumerate(other.get("actions", [])):
            if action["status"] == "accepted" and actions[place]["status"] != "accepted":
                actions[place] = action
    return None


def _tenant(state: RequestState) -> str:
    return getattr(state.request, "cache_salt", None) or ""


def _actions(envelopes: Iterable[Envelope]) -> Iterable[Action]:
    return (action for envelope in envelopes for action in envelope.actions)


def _envelopes(request: Request) -> list[Envelope]:
    """Read the envelopes of a request: vLLM's own, and the one in its ``kv_transfer_params``."""
    values: list[object] = []
    if (hints := getattr(request, "kv_hints", None)) is not None:  # vLLM has the attribute from 0.32 on
        values.append(
            {
                "protocol_version": hints.protocol_version,
                "message_id": hints.message_id,
                "actions": [
                    {
                        "action_id": action.action_id,
                        "action_type": action.action_type,
                        "action_version": action.action_version,
                        "payload": action.payload,
                    }
                    for action in hints.actions
                ],
            }
        )
    options = (request.kv_transfer_params or {}).get(REQUEST_KEY)
    if isinstance(options, Mapping) and options.get("hints") is not None:
        values.append(options["hints"])
    return [read_envelope(value) for value in values]
