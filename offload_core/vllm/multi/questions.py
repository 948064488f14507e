"""The engine's questions to all connectors, and the loads that follow from the answers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_core.config.connectors import MultiConnectorConfig
from offload_core.lookup.connector_choice import FAILED, Answer, ConnectorChoice, Question
from offload_core.runtime.metrics import Counters
from offload_core.vllm.scheduler.block_holders import has_free_blocks, held_blocks, most_blocks

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_OFFERS_AFTER_FAILURE = 4


@dataclass(frozen=True)
class _Load:
    """A load that a request waits for, from the connector at ``place``."""

    request: Request
    place: int
    computed_tokens: int
    external_tokens: int


class Questions:
    """Asks all connectors for each request, chooses one, and counts. All methods run on the engine thread.

    Args:
        connectors: in the order of the configuration.
        chosen: by request, the place of the connector that loads for it. This class keeps it up to date.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: MultiConnectorConfig,
        connectors: Sequence[KVConnectorBase_V1],
        chosen: dict[str, int],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = config.names
        self._wait_seconds = config.limits.lookup_timeout_seconds
        self._connectors = connectors
        self._chosen = chosen
        self._counters = counters
        self._clock = clock
        self._choice = ConnectorChoice(config.names, config.weights, config.limits)
        self._questions: dict[str, Question] = {}
        self._computed_tokens: dict[str, int] = {}
        self._loads: dict[str, _Load] = {}
        self._loads_of: Counter[int] = Counter()
        self._recomputing: dict[str, int] = {}
        """Requests whose load has failed and that have not run since, with the number of further offers to them."""
        self._block_pool: BlockPool | None = None
        self._block_sizes: Sequence[int] = ()
        self._lacking_blocks: dict[str, int] = {}
        """By request that has not run since its load began, also if that has failed: the most blocks that it lacks."""
        self._failed_once: set[str] = set()
        self._held_since: dict[str, float] = {}
        """Requests whose load waits until others have run whose load has failed."""
        self._reported: set[int] = set()
        """Connectors whose error was logged with its traceback."""

    def bind(self, block_pool: BlockPool, block_sizes: Sequence[int]) -> None:
        """Use the engine's block pool to see room for loads.

        Args:
            block_sizes: tokens per block of each of the engine's groups.
        """
        self._block_pool, self._block_sizes = block_pool, block_sizes

    def ask(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load past ``computed_tokens`` (``None``: ask again), and whether they load meanwhile."""
        request_id, now = request.request_id, self._clock()
        question = self._questions.setdefault(request_id, Question())
        self._computed_tokens[request_id] = computed_tokens
        most_tokens = request.num_tokens - computed_tokens
        asked = [self._ask(place, request, computed_tokens, most_tokens) for place in range(len(self._connectors))]
        answers = [answer for answer, _ in asked]
        busy = [self._loads_of[place] > 0 for place in range(len(self._connectors))]
        decision = self._choice.choose(question, answers, most_tokens, busy, now)
        self._chosen.pop(request_id, None)
        if decision.ask_again:
            return None, False
        if decision.connector is None:
            return 0, False
        may_load = self._may_load(request, now)
        if not may_load:
            return (None if may_load is None else 0), False
        self._chosen[request_id] = decision.connector
        tokens, loads_meanwhile = asked[decision.connector]
        assert isinstance(tokens, int)
        return tokens, loads_meanwhile

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Note that the engine has taken the answer: it loads ``external_tokens`` tokens into ``blocks``, or none."""
        request_id = request.request_id
        question = self._questions.pop(request_id, None)
        if question is None:
            return  # its load has ended, and now it runs
        self._held_since.pop(request_id, None)
        computed_tokens = self._computed_tokens.pop(request_id)
        self._choice.ended(question, self._clock())
        for place, name in enumerate(self._names):
            self._counters.add("queries", name)
            self._counters.add("query_hits" if place in question.offered else "query_misses", name)
            self._counters.add("query_timeouts", name, int(place in question.late))
        if not external_tokens:
            return
        place = self._chosen[request_id]
        self._recomputing.pop(request_id, None)  # the engine has found blocks for another load of it
        self._loads[request_id] = _Load(request, place, computed_tokens, external_tokens)
        self._loads_of[place] += 1
        if self._block_pool is not None:
            self._lacking_blocks[request_id] = max(0, self._needed_blocks(request) - held_blocks(blocks))
        self._counters.add("pending_loads", self._names[place])

    def loads_ended(self, finished: Collection[str], failed: Collection[str]) -> None:
        """Handle the ends of loads.

        Args:
            finished: requests whose load has ended.
            failed: requests among them whose load has failed.
        """
        for request_id in finished:
            load = self._loads.get(request_id)
            if load is None:
                continue
            self._end_load(load)
            if request_id in failed:
                self._counters.add("load_failures", self._names[load.place])
                self._recomputing[request_id] = 0 if request_id in self._failed_once else _OFFERS_AFTER_FAILURE
                self._failed_once.add(request_id)
                self._lacking_blocks[request_id] = self._needed_blocks(load.request)  # vLLM takes back those it has
                continue
            # The engine has already shortened the prefix of a request if a part of its load is missing.
            loaded = min(load.external_tokens, load.request.num_computed_tokens - load.computed_tokens)
            self._counters.add("hit_tokens", self._names[load.place], max(0, loaded))

    def ran(self, request_ids: Collection[str]) -> None:
        """Note requests that run in this step. A load that has not ended by then was a part of it."""
        for request_id in request_ids:
            self._recomputing.pop(request_id, None)
            self._lacking_blocks.pop(request_id, None)
            load = self._loads.get(request_id)
            if load is not None:
                self._end_load(load)
                self._counters.add("hit_tokens", self._names[load.place], load.external_tokens)

    def request_ended(self, request_id: str) -> None:
        """Forget a request."""
        question = self._questions.pop(request_id, None)
        if question is not None:
            self._choice.ended(question, self._clock())
        load = self._loads.get(request_id)
        if load is not None:
            self._end_load(load)
        self._computed_tokens.pop(request_id, None)
        self._recomputing.pop(request_id, None)
        self._lacking_blocks.pop(request_id, None)
        self._held_since.pop(request_id, None)
        self._failed_once.discard(request_id)

    def _ask(self, place: int, request: Request, computed_tokens: int, most_tokens: int) -> tuple[Answer, bool]:
        """Ask one connector. An error, or an answer that cannot be, counts as a miss."""
        try:
            tokens, loads_meanwhile = self._connectors[place].get_num_new_matched_tokens(request, computed_tokens)
            if tokens is not None and not 0 <= tokens <= most_tokens:
                raise ValueError(f"it offers {tokens} tokens, but the request has {most_tokens} left")
        except Exception as error:
            self._counters.add("query_errors", self._names[place])
            first = place not in self._reported
            self._reported.add(place)
            if first:
                logger.warning(
                    "connector %r raised an error when it was asked for a request, which counts as a miss (%s: %s); "
                    "later errors are counted only, by query_errors",
                    self._names[place], type(error).__name__, error, exc_info=True,
                )  # fmt: skip
            return FAILED, False
        return tokens, loads_meanwhile

    def _may_load(self, request: Request, now: float) -> bool | None:
        """Return whether a request may be offered a load; ``None`` to be asked again.

        vLLM reserves blocks for a request whose load has failed until it runs. It admits no load that does not fit
        beside these reservations, and looks at no request behind it. So if blocks are short, loads of other requests
        wait until that request runs. It may wait for something else than blocks, for as long as others run. It gets a
        few further offers only, since its own reservation may be in the way.
        """
        request_id = request.request_id
        if request_id in self._recomputing:
            left = self._recomputing[request_id]
            self._recomputing[request_id] = max(0, left - 1)
            return left > 0
        if not self._recomputing or self._has_room(request):
            self._held_since.pop(request_id, None)
            return True
        waited = now - self._held_since.setdefault(request_id, now)
        return None if waited < self._wait_seconds else False

    def _has_room(self, request: Request) -> bool:
        """Return whether there are free blocks for a request, and for all that load or will be recomputed."""
        needed = sum(self._lacking_blocks.values()) + self._needed_blocks(request)
        return has_free_blocks(self._block_pool, needed)

    def _needed_blocks(self, request: Request) -> int:
        return most_blocks(request.num_tokens, self._block_sizes, len(self._block_sizes))

    def _end_load(self, load: _Load) -> None:
        del self._loads[load.request.request_id]
        self._loads_of[load.place] -= 1
        self._counters.add("pending_loads", self._names[load.place], -1)
