"""The requests that have ended, for the trace and for the live curves.

The curves have a thread of their own: a request takes them a large part of a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

from offload_core.config.model import OffloadConfig
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import CallLimit, DaemonExecutor
from offload_core.simulation.trace_recorder import TraceRecorder
from offload_core.tiers.live_curves import LiveCurves
from offload_core.tiers.tier import Tier
from offload_core.vllm.scheduler.placement_plan import PlacementPlan
from offload_core.vllm.scheduler.request_state import RequestState

_CLOSE_SECONDS = 1.0
_MAX_WAITING = 1000
"""Requests that may wait for the curves. Each has the hashes of its path."""


class EndedRequests:
    """Gives each ended request to the trace, if there is one, and to the live curves. For the engine thread."""

    def __init__(
        self,
        config: OffloadConfig,
        planner: HybridOffloadPlanner,
        tiers: Sequence[Tier],
        placement: PlacementPlan,
        counters: Counters,
    ) -> None:
        settings = config.settings
        self._placement = placement
        self._prompt_only = settings.offload_prompt_only
        self._curves = LiveCurves(config, planner, tiers, counters)
        self._curves_thread = DaemonExecutor(1, "offload-curves")
        self._limit = CallLimit(_MAX_WAITING)
        self._last_call: Future[None] | None = None
        """The curves' latest call."""
        self._is_closed = False
        self._trace: TraceRecorder | None = None
        if settings.trace_file is not None:
            self._trace = TraceRecorder(settings.trace_file, planner.boundary_tokens, settings.trace_file_bytes)

    def start(self, ranks: Sequence[Mapping[str, int]]) -> None:
        """Begin the estimates; see :meth:`LiveCurves.start`."""
        self._curves.start(ranks)

    def add(self, state: RequestState) -> None:
        """Add a request that has ended."""
        self._record(state)
        self._estimate(state)

    def reset(self) -> None:
        """Forget the requests of the curves, since the names of chunks change."""
        if self._curves.exist and not self._is_closed:
            with suppress(RuntimeError):  # no thread can be started
                self._last_call = self._curves_thread.submit(self._curves.reset)

    def settle(self, seconds: float) -> None:
        """Wait until the curves have all requests, at most some seconds."""
        if self._last_call is not None:
            wait([self._last_call], seconds)

    def close(self) -> None:
        """End the curves and the trace."""
        self._is_closed = True
        self.settle(_CLOSE_SECONDS)
        self._curves_thread.shutdown()
        if self._trace is not None:
            self._trace.close()

    def _record(self, state: RequestState) -> None:
        if self._trace is not None:
            request, hashes = state.request, self._placement.prompt_hashes(state)
            output_tokens = request.num_tokens - request.num_prompt_tokens
            self._trace.record(state.arrived, request.num_prompt_tokens, output_tokens, hashes)

    def _estimate(self, state: RequestState) -> None:
        """Add a request to the live curves, if it loads and stores and its prompt was computed.

        Without a place among the waiting requests, or a thread, it is left out.
        """
        if not self._curves.exist or self._is_closed:
            return
        request, options = state.request, state.options
        is_whole = options.load and options.store and request.num_computed_tokens >= request.num_prompt_tokens
        if is_whole:
            tokens = request.num_prompt_tokens if self._prompt_only else request.num_computed_tokens
            added = (self._placement.boundary_names(state, tokens), request.num_prompt_tokens, state.seen_boundaries)
            with suppress(RuntimeError):  # no thread can be started
                self._last_call = self._limit.submit(self._curves_thread, self._curves.add, *added) or self._last_call
