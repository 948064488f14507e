"""What the two halves of the connector tell each other, once per engine step.

Plain data that vLLM pickles between its own processes. Chunks are named by :class:`ChunkRef`, without the rank: each
worker completes the key with its own namespace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from offload_core.memory.block_copier import BlockSlice
from offload_core.objects.fingerprint import Json
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.tiers.changes import TierChange


@dataclass(frozen=True)
class ChunkTransfer:
    """A chunk to load or store, and its KV cache blocks per group of its pack."""

    chunk: ChunkRef
    blocks: tuple[BlockSlice, ...]


@dataclass(frozen=True)
class RequestLoad:
    """The load that one request waits for.

    Args:
        impossible: asks the worker to report a failure at once.
        waited_seconds: how long the request has waited for loads before this one.
    """

    job_id: int
    request_id: str
    tier: str
    chunks: tuple[ChunkTransfer, ...]
    impossible: bool = False
    waited_seconds: float = 0.0


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler half to worker half."""

    namespaces: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Per adapter of this step's chunks, the namespace of each rank's keys."""
    loads: list[RequestLoad] = field(default_factory=list)
    stores: list[ChunkTransfer] = field(default_factory=list)
    cancelled_jobs: list[int] = field(default_factory=list)
    failures_to_report: list[str] = field(default_factory=list)
    """Requests whose failed load the engine may learn of now."""
    idle: bool = False
    """No forward pass in this step, so a brief wait for an arrival holds nobody up."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker half to scheduler half."""

    failed: set[tuple[str, ChunkRef]] = field(default_factory=set)
    """Names of tiers, and chunks that a load from there did not get."""
    failed_requests: set[str] = field(default_factory=set)
    """Requests whose load has failed, of which the engine does not know yet."""
    partial_requests: set[str] = field(default_factory=set)
    """Requests of whose load the engine uses the part that has come."""
    stores_ended: Counter[ChunkRef] = field(default_factory=Counter)
    """Per chunk, how many ranks' stores have ended, well or not."""
    not_stored: set[ChunkRef] = field(default_factory=set)
    """Chunks of which some rank's part is on no tier."""
    changes: list[TierChange] = field(default_factory=list)
    """What has come to media that only the worker sees, and left them."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Per tier, how many ranks more (fewer, where it is negative) have no use for lookups of it: loads are refused."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Combine two ranks' reports: a chunk is only there when every rank has its part."""
        assert isinstance(other, StepReport)
        refusals = Counter(self.refusals)
        refusals.update(other.refusals)  # the sum of two counters would leave out what is negative
        return StepReport(
            self.failed | other.failed,
            self.failed_requests | other.failed_requests,
            self.partial_requests | other.partial_requests,
            self.stores_ended + other.stores_ended,
            self.not_stored | other.not_stored,
            self.changes + other.changes,
            refusals,
        )


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """What only a worker knows of its cache's bytes; it goes into the rank's fingerprint."""

    layout: dict[str, Json]
