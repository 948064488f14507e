"""The messages between the two halves of the connector, once per engine step.

They are plain data; vLLM pickles them between its own processes. A :class:`ChunkRef` names a chunk without the rank:
each worker completes the key with its own namespace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """A chunk to load or store and, per group of its pack, its blocks in the KV cache.

    Args:
        spare: for a store, whether it may use free capacity only.
    """

    chunk: ChunkRef
    blocks: tuple[BlockSlice, ...]
    spare: bool = False


class ChunkTouch(NamedTuple):
    """A chunk to make the most recently used one, and whether it is spare from now on."""

    chunk: ChunkRef
    spare: bool


@dataclass(frozen=True)
class RequestLoad:
    """The load that one request waits for.

    Args:
        impossible: whether the worker reports a failure at once, without a load.
        waited_seconds: how long the request has waited for earlier loads.
        keep: whether the worker keeps the objects at hand, if the tier lends all of them.
        within_step: whether the request runs in this step. All objects are kept from earlier loads.
    """

    job_id: int
    request_id: str
    tier: str
    chunks: tuple[ChunkTransfer, ...]
    impossible: bool = False
    waited_seconds: float = 0.0
    keep: bool = False
    within_step: bool = False


@dataclass(frozen=True)
class Prefetch:
    """Objects to load for no request, so that faster tiers keep them.

    Args:
        last: whether the report waits until the tiers have stored them.
    """

    job_id: int
    tier: str
    chunks: tuple[ChunkRef, ...]
    last: bool


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Message from the scheduler half to the worker half."""

    namespaces: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Per adapter of this step's chunks, the namespace of each rank's keys."""
    loads: list[RequestLoad] = field(default_factory=list)
    stores: list[ChunkTransfer] = field(default_factory=list)
    prefetches: list[Prefetch] = field(default_factory=list)
    touches: list[ChunkTouch] = field(default_factory=list)
    """In this order, and before the stores."""
    cancelled_jobs: list[int] = field(default_factory=list)
    failures_to_report: list[str] = field(default_factory=list)
    """Requests whose failed load the workers report to the engine now."""
    given_back: list[int] = field(default_factory=list)
    """Jobs whose objects the workers keep no longer, after the loads of this step."""
    idle: bool = False
    """True if the step has no forward pass, so that a brief wait for an arrival delays no request."""
    stores_wait: bool = False
    """True if chunks wait for the end of other stores, which an idle step should wait for too."""

    @property
    def is_quiet(self) -> bool:
        """True if the workers have nothing to begin or to end."""
        if self.loads or self.stores or self.touches or self.prefetches:
            return False
        return not (self.cancelled_jobs or self.failures_to_report or self.given_back)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Message from the worker half to the scheduler half."""

    failed_chunks: set[tuple[str, ChunkRef]] = field(default_factory=set)
    """Tier names, each with a chunk that a load from there did not get."""
    failed_requests: set[str] = field(default_factory=set)
    """Requests whose load has failed; the engine does not know it yet."""
    partial_requests: set[str] = field(default_factory=set)
    """Requests with a partial load: the engine uses the arrived part."""
    stores_ended: Counter[ChunkRef] = field(default_factory=Counter)
    """Per chunk, the number of ranks whose store has ended, with or without success."""
    not_stored: set[ChunkRef] = field(default_factory=set)
    """Chunks that some rank has stored on no tier."""
    kept_jobs: Counter[int] = field(default_factory=Counter)
    """Per load, the number of ranks that keep all its objects at hand."""
    prefetches_ended: Counter[int] = field(default_factory=Counter)
    """Per prefetch, the number of ranks that have ended it."""
    prefetches_failed: set[int] = field(default_factory=set)
    """Prefetches among these that did not get all their objects."""
    changes: list[TierChange] = field(default_factory=list)
    """Objects added to or removed from media that only the worker sees."""
    ranks_refusing_loads: Counter[str] = field(default_factory=Counter)
    """Per tier, the change in the number of ranks that refuse loads from it and so need no lookups; may be negative."""
    ranks_storing: int = 0
    """The change in the number of ranks whose stores go on at some tier; counted for KV events only."""

    @property
    def is_empty(self) -> bool:
        """True if it has nothing to say."""
        if self.failed_chunks or self.failed_requests or self.partial_requests or self.stores_ended:
            return False
        changes = self.changes or self.ranks_refusing_loads or self.ranks_storing
        return not (changes or self.kept_jobs or self.prefetches_ended)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Combine two ranks' reports: a chunk is stored only if every rank has stored its part."""
        assert isinstance(other, StepReport)
        refusing = Counter(self.ranks_refusing_loads)
        refusing.update(other.ranks_refusing_loads)  # the sum of two counters would omit negative counts
        return StepReport(
            self.failed_chunks | other.failed_chunks,
            self.failed_requests | other.failed_requests,
            self.partial_requests | other.partial_requests,
            self.stores_ended + other.stores_ended,
            self.not_stored | other.not_stored,
            self.kept_jobs + other.kept_jobs,
            self.prefetches_ended + other.prefetches_ended,
            self.prefetches_failed | other.prefetches_failed,
            self.changes + other.changes,
            refusing,
            self.ranks_storing + other.ranks_storing,
        )


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """The facts that only a worker knows.

    Args:
        layout: the layout of its KV cache, part of the rank's fingerprint.
        object_bytes: per pack name, the bytes of one of its objects, uncompressed.
        store_bytes: bytes of stores that may be on their way at once.
        step_store_bytes: bytes of stores that may begin in one step.
    """

    layout: dict[str, Json]
    object_bytes: dict[str, int]
    store_bytes: float = math.inf
    step_store_bytes: float = math.inf


def largest_objects(workers: Iterable[WorkerIdentity]) -> dict[str, int]:
    """Return, per pack name, the bytes of the largest rank's object. Pipeline stages have different layers."""
    largest: Counter[str] = Counter()
    for worker in workers:
        largest |= Counter(worker.object_bytes)
    return dict(largest)
