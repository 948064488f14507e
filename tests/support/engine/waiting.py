"""A connector that measures how long each request waits for storage; it poisons blocks too, see :mod:`.poisoning`.

A request waits in each step in which the engine asks for it and is told to ask again, until it asks the next time, and
from the start of its load until the engine learns how that has ended. Where the engine does not come to ask, because it
has no room or no turn for the request, storage is not to blame, and nothing is counted.
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
    """How long one request has waited for storage, in seconds.

    Args:
        lookups: for answers, its own and those that other requests' loads stand for.
        loads: for loads, until their verdict.
        kept_back: for the engine to be told of a load that has failed.
        longest_step: the longest step of the engine in these times.
        asked: how often the engine was told to ask again.
        loads_begun: how many loads it had.
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
        self._since: dict[str, tuple[str, float]] = {}  # per request that waits: for what, and since when
        self._asked: set[str] = set()  # told in this step to ask again
        self._last_step = clock()

    def begin(self, request_id: str, what: str) -> None:
        """Note that a request waits for ``what``, a field of :class:`StorageWait`; it may do so already."""
        wait = self._waits.setdefault(request_id, StorageWait())
        if what == "lookups":
            wait.asked += 1
            self._asked.add(request_id)
        elif what == "loads":
            wait.loads_begun += 1
        if request_id not in self._since:
            self._since[request_id] = (what, self._clock())

    def end(self, request_id: str) -> None:
        """Note that a request does not wait any more; it may not have waited at all."""
        if (begun := self._since.pop(request_id, None)) is not None:
            what, since = begun
            wait, now = self._waits[request_id], self._clock()
            setattr(wait, what, getattr(wait, what) + now - since)
            wait.longest_step = max(wait.longest_step, now - self._last_step)

    def step(self) -> None:
        """Note that the engine has asked all that it asks in this step."""
        now = self._clock()
        for request_id, (what, _) in list(self._since.items()):
            wait = self._waits[request_id]
            wait.longest_step = max(wait.longest_step, now - self._last_step)
            if what == "lookups" and request_id not in self._asked:
                self.end(request_id)
        self._asked.clear()
        self._last_step = now

    def take(self) -> dict[str, StorageWait]:
        """Return the waits since the last call, of requests that have ended, and forget them."""
        waits, self._waits = self._waits, {key: self._waits[key] for key in self._since}
        return {key: wait for key, wait in waits.items() if key not in self._since}


class WaitingConnector(PoisoningConnector):
    """Measures every request's waits; otherwise the connector that it inherits from."""

    current: ClassVar[dict[KVConnectorRole, WaitingConnector]] = {}
    """The connectors of this process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.waits = StorageWaits()
        self.current[role] = self

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Note whether the request must ask again."""
        matched, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched is None:
            self.waits.begin(request.request_id, "lookups")
        else:
            self.waits.end(request.request_id)
        return matched, asynchronous

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note that a load begins."""
        if num_external_tokens:
            self.waits.begin(request.request_id, "loads")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PoisonedStepMetadata:
        """Note what this step has asked."""
        self.waits.step()
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note loads that have ended, and of failed ones also when the engine learns of it."""
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
        """Note the end of a request."""
        self.waits.end(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


with contextlib.suppress(ValueError):  # see offload_core.vllm.connector
    KVConnectorFactory.register_connector("WaitingConnector", __name__, "WaitingConnector")
