"""Connectors whose engine evicts some groups' blocks before each request, so that local hits diverge.

Each is our connector with poisoned loads (:mod:`tests.support.engine.poisoning`).
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_core.vllm.metadata import RequestLoad
from tests.support.engine.poisoning import PoisonedStepMetadata, PoisoningConnector
from tests.support.local_eviction import evict, evict_path

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

TAIL_TOKENS = 512
"""The prefix that evictions of a tail keep."""


class _Diverging(PoisoningConnector):
    whole: tuple[str, ...] = ()
    """Kinds of groups of which all blocks are evicted."""
    tail: tuple[str, ...] = ()
    """Kinds of groups of which the request's blocks behind :data:`TAIL_TOKENS` are evicted."""

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        for kind in self.whole:
            evict(self._pool, self._kv_caches, kind)
        for kind in self.tail:
            evict_path(self._pool, self._kv_caches, kind, request, TAIL_TOKENS)
        super().on_new_request(request)


class EvictsStates(_Diverging):
    whole = ("states",)


class EvictsStatesAndTail(_Diverging):
    whole = ("states",)
    tail = ("attention",)


class EvictsTail(_Diverging):
    """The states stay, deeper than attention."""

    tail = ("attention",)


class EvictsStatesEverywhere(EvictsStates):
    """The tier loses its states too."""

    def on_new_request(self, request: Request) -> None:
        transfer = self._vllm_config.kv_transfer_config
        for path in Path(transfer.kv_connector_extra_config["backends"][0]["path"]).rglob("state-*/**/*.kv"):
            path.unlink()
        super().on_new_request(request)


class EvictsWindows(_Diverging):
    whole = ("windows",)


class EvictsWindowsTail(_Diverging):
    tail = ("windows",)


class EvictsAttention(_Diverging):
    whole = ("attention",)


class EvictsAtRandom(_Diverging):
    """Evicts all states before every other request, and a few blocks of any kind."""

    _draw = random.Random(5)

    def on_new_request(self, request: Request) -> None:
        self.whole = self._draw.choice(((), ("states",)))
        self._pool.evict_blocks({self._draw.randrange(1, self._pool.num_gpu_blocks) for _ in range(2)})
        super().on_new_request(request)


class PoisonsAllElse(EvictsStates):
    """Before each load, every block is filled that no request holds; so only verified sources of the prefix are good.

    These are the blocks of the local prefix and the loaded ones. All others leave the local cache.
    """

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            free = {block.block_id for block in self._pool.blocks if not block.is_null and block.ref_cnt == 0}
            self._pool.evict_blocks(free)
            for group_id in range(len(self._kv_caches.kv_cache_groups)):
                self._poisoned_blocks.setdefault(group_id, []).extend(free)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PoisonedStepMetadata:
        step = super().build_connector_meta(scheduler_output)
        step.loads = [self.sent(load) for load in step.loads]
        return step

    def sent(self, load: RequestLoad) -> RequestLoad:
        """Return the load that the workers make."""
        return load


class ClaimsStates(PoisonsAllElse):
    """With a fault: it reports states as loaded that it has left out."""

    def sent(self, load: RequestLoad) -> RequestLoad:
        chunks = tuple(item for item in load.chunks if not item.chunk.pack.startswith("state"))
        return dataclasses.replace(load, chunks=chunks)


class ClaimsAttention(PoisonsAllElse):
    """With a fault: it reports the last block of attention as loaded that it has left out."""

    def sent(self, load: RequestLoad) -> RequestLoad:
        chunks = tuple(item for item in load.chunks if item.chunk.pack.startswith("state"))
        return dataclasses.replace(load, chunks=chunks)


def connector(name: str, transfer: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with a connector of this module."""
    return transfer | {"kv_connector": name, "kv_connector_module_path": __name__}
