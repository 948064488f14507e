"""A connector that measures each request's wait for storage; it poisons blocks too, see :mod:`.poisoning`.

Two kinds of wait are counted:

- The engine asks for a request and is told to ask again; the wait ends when it asks the next time.
- A load has started; the wait ends when the engine learns its outcome.

The engine may not ask at all, because it has no free blocks or no turn for the request. Storage is not to blame then,
and no time is counted. The engine may also get an answer, have no free blocks to run the request, and ask again later.
The waits for lookups before that answer did not delay the request, so they do not count either.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from offload_core.vllm.metadata import StepReport
from tests.support.engine.poisoning import PoisonedStepMetadata, PoisoningConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StorageWait:
    """The wait of one request for storage, in seconds.

    Args:
        lookups: the wait for lookups, including lookups that wait for another request's load.
        loads: the wait for loads, until their outcome.
        kept_back: the wait until the engine learns of a failed load.
        longest_step: the longest step of the engine during these waits.
        asked: the number of times that the engine was told to ask again.
        loads_begun: the number of loads.
    """

    lookups: float = 0.0
    loads: float = 0.0
    kept_back: float = 0.0
    longest_step: float = 0.0
    asked: int = 0
    loads_begun: int = 0


class StorageWaits:
    """The waits of all requests. For the engine thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[str, StorageWait] = {}
        self._since: dict[str, tuple[str, float]] = {}  # per waiting request: the kind of wait and its begin
        self._asked: set[str] = set()  # requests for which the engine must ask again, of this step
        self._answered: set[str] = set()  # requests whose answer the engine has not used
        self._last_step = clock()

    def begin(self, request_id: str, kind: str) -> None:
        """Begin a wait of a request, unless it waits already; ``kind`` is a field of :class:`StorageWait`."""
        wait = self._waits.setdefault(request_id, StorageWait())
        if kind == "lookups":
            if request_id in self._answered:
                self._answered.discard(request_id)
                wait.lookups = 0.0
            wait.asked += 1
            self._asked.add(request_id)
        elif kind == "loads":
            wait.loads_begun += 1
        if request_id not in self._since:
            self._since[request_id] = (kind, self._clock())

    def end(self, request_id: str) -> None:
        """End the wait of a request, if it waits."""
        if (begun := self._since.pop(request_id, None)) is not None:
            kind, since = begun
            wait, now = self._waits[request_id], self._clock()
            setattr(wait, kind, getattr(wait, kind) + now - since)
            wait.longest_step = max(wait.longest_step, now - self._last_step)

    def answer(self, request_id: str) -> None:
        """End the wait for lookups: the engine has its answer, and runs the request if it has free blocks."""
        self.end(request_id)
        self._answered.add(request_id)

    def run(self, request_id: str) -> None:
        """Note that the engine has blocks for the request."""
        self._answered.discard(request_id)

    def step(self) -> None:
        """End a step, after the engine's last question in it."""
        now = self._clock()
        for request_id, (kind, _) in list(self._since.items()):
            wait = self._waits[request_id]
            wait.longest_step = max(wait.longest_step, now - self._last_step)
            if kind == "lookups" and request_id not in self._asked:
                self.end(request_id)
        self._asked.clear()
        self._last_step = now

    def take(self) -> dict[str, StorageWait]:
        """Return and forget the waits of requests that have stopped waiting since the last call."""
        waits, self._waits = self._waits, {key: self._waits[key] for key in self._since}
        return {key: wait for key, wait in waits.items() if key not in self._since}


class WaitingConnector(PoisoningConnector):
    """A connector that measures every request's waits; otherwise as its base class."""

    current: ClassVar[dict[KVConnectorRole, WaitingConnector]] = {}
    """The connectors of this process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.waits = StorageWaits()
        self.current[role] = self

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Begin a wait if the engine must ask again, else end it."""
        matched, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched is None:
            self.waits.begin(request.request_id, "lookups")
        else:
            self.waits.answer(request.request_id)
        return matched, asynchronous

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begin the wait for a load, if there is one."""
        self.waits.run(request.request_id)
        if num_external_tokens:
            self.waits.begin(request.request_id, "loads")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PoisonedStepMetadata:
        """End this step's questions."""
        self.waits.step()
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """End the waits for loads; after a failed load, wait until the engine learns of it."""
        report = connector_output.kv_connector_worker_meta
        for request_id in report.failed_requests if isinstance(report, StepReport) else ():
            self.waits.end(request_id)
            self.waits.begin(request_id, "kept_back")
        for request_id in connector_output.finished_recving or ():
            self.waits.end(request_id)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the wait of a finished request."""
        self.waits.end(request.request_id)
        self.waits.run(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


with contextlib.suppress(ValueError):  # see offload_core.vllm.connector
    KVConnectorFactory.register_connector("WaitingConnector", __name__, "WaitingConnector")
