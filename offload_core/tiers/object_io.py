"""A tier's data path: reserve, compress or decompress, move and verify a batch of objects.

Every answer of the backend is checked against clause C2 of the contract, one result per key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.objects.arriving_object import ArrivingObject
from offload_core.tiers.compression import TierCodec
from offload_core.tiers.staged_object import StagedObject, StoredForm

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

T = TypeVar("T")


class ObjectIO:
    """Moves batches of objects between staging memory and one tier's backend. Exceptions of the backend pass through.

    Args:
        on_eviction: called with the objects that the backend evicted for a store.
    """

    def __init__(
        self, tier: str, backend: Backend[Any], codec: TierCodec, on_eviction: Callable[[Sequence[ObjectKey]], None]
    ) -> None:
        self._tier = tier
        self._backend = backend
        self._codec = codec
        self._sizes = backend.capabilities.sizes
        self._spares = backend.capabilities.spares
        self._loads_in_one_call = backend.loads_in_one_call
        self._on_eviction = on_eviction

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether the object is there."""
        return list(map(bool, self._one_per_key(keys, await answer(self._backend.contains(keys)), "contains")))

    async def load(self, objects: Sequence[StagedObject], staging: TierShare | None) -> tuple[list[LoadOutcome], int]:
        """Load and verify objects.

        Returns:
            One outcome per object, and the bytes of the hits as the medium has them.
        """
        if not self._loads_in_one_call or self._codec.compresses:  # compressed objects have sizes of their own
            return await self._load_in_steps(objects, staging)
        outcomes, other_sizes = await self._load_in_one_call(objects)
        nbytes = sum(one.lease.nbytes for one, got in zip(objects, outcomes, strict=True) if got is LoadOutcome.HIT)
        if other_sizes:  # damaged, or compressed under another configuration
            again, more_bytes = await self._load_in_steps([objects[index] for index in other_sizes], staging)
            _put(outcomes, other_sizes, again)
            nbytes += more_bytes
        return outcomes, nbytes

    async def _load_in_one_call(self, objects: Sequence[StagedObject]) -> tuple[list[LoadOutcome], list[int]]:
        """Load objects that are not compressed; the backend's threads check their parts as they arrive.

        An object whose check has not passed is verified afterwards: the backend may not have told of all its parts.

        Returns:
            One outcome per object, and the places of the objects that did not fit their buffers.
        """
        keys = [staged.key for staged in objects]
        views = [staged.lease.view for staged in objects]
        checks = [ArrivingObject(view, key) for view, key in zip(views, keys, strict=True)]
        results = await self._backend.load_and_check(keys, views, checks)
        outcomes = self._one_per_key(keys, results, "load_and_check")
        other_sizes = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.CORRUPT]
        hits = zip(outcomes, checks, strict=True)
        left = [index for index, (got, check) in enumerate(hits) if got is LoadOutcome.HIT and not check.passed]
        if left:
            forms = [StoredForm(objects[index], views[index]) for index in left]
            _put(outcomes, left, await self._codec.verify(forms, [LoadOutcome.HIT] * len(left), self._backend))
        return outcomes, other_sizes

    async def _load_in_steps(
        self, objects: Sequence[StagedObject], staging: TierShare | None
    ) -> tuple[list[LoadOutcome], int]:
        """Load and verify objects of any form: ask for their sizes, load, and verify them afterwards."""
        keys = [staged.key for staged in objects]
        reservation = await self._backend.prepare_load(keys)
        scratch: list[Lease] = []
        try:
            present = self._one_per_key(keys, reservation.present, "prepare_load")
            reported_sizes = reservation.nbytes if self._sizes else (None,) * len(keys)
            sizes = self._one_per_key(keys, reported_sizes, "prepare_load (nbytes)")
            targets = [
                self._codec.load_target(staged, size, staging, scratch) if there else LoadOutcome.MISS
                for staged, there, size in zip(objects, present, sizes, strict=True)
            ]
            wanted = [target for target in targets if isinstance(target, StoredForm)]
            verified: list[LoadOutcome] = []
            if wanted:
                wanted_keys = [form.staged.key for form in wanted]
                results = await self._backend.load_into(wanted_keys, [form.view for form in wanted])
                loaded = self._one_per_key(wanted_keys, results, "load_into")
                verified = await self._codec.verify(wanted, loaded, self._backend)
            nbytes = sum(len(form.view) for form, got in zip(wanted, verified, strict=True) if got is LoadOutcome.HIT)
            outcomes = iter(verified)
            return [next(outcomes) if isinstance(target, StoredForm) else target for target in targets], nbytes
        finally:
            for lease in scratch:
                lease.release()
            await reservation.release()

    async def compress(
        self, objects: Sequence[StagedObject], staging: TierShare | None, scratch: list[Lease]
    ) -> list[StoredForm | None]:
        """Return the form in which each object is to be stored; objects on the medium are not compressed again.

        Args:
            scratch: gets the leases of compressed objects, for the caller to release, also when this raises.
        """
        uncompressed: list[StoredForm | None] = [StoredForm(staged, staged.lease.view) for staged in objects]
        if not self._codec.compresses:
            return uncompressed
        keys = [staged.key for staged in objects]
        there = self._one_per_key(keys, await self._backend.contains(keys), "contains")
        absent = [staged for staged, present in zip(objects, there, strict=True) if not present]
        forms = iter(await self._codec.compress(absent, self._backend, staging, scratch))
        return [form if present else next(forms) for form, present in zip(uncompressed, there, strict=True)]

    async def store(self, forms: Sequence[StoredForm | None]) -> list[StoreOutcome | None]:
        """Store objects; the outcome of an object without a form is ``None``."""
        outcomes = iter(await self._store([form for form in forms if form is not None]))
        return [None if form is None else next(outcomes) for form in forms]

    async def _store(self, objects: Sequence[StoredForm]) -> list[StoreOutcome]:
        keys = [form.staged.key for form in objects]
        sizes = [len(form.view) for form in objects]
        spare = [form.staged.spare for form in objects] if self._spares else []
        if any(spare):
            reservation = await self._backend.prepare_store(keys, sizes, spare)
        else:
            reservation = await self._backend.prepare_store(keys, sizes)
        try:
            self._on_eviction(reservation.evicted)
            prepared = self._one_per_key(keys, reservation.outcomes, "prepare_store")
            wanted = [form for form, outcome in zip(objects, prepared, strict=True) if outcome is None]
            if not wanted:
                return [outcome for outcome in prepared if outcome is not None]
            wanted_keys = [form.staged.key for form in wanted]
            buffers = [form.view.toreadonly() for form in wanted]
            stored = iter(self._one_per_key(wanted_keys, await self._backend.store(wanted_keys, buffers), "store"))
            return [next(stored) if outcome is None else outcome for outcome in prepared]
        finally:
            await reservation.release()

    def _one_per_key(self, keys: Sequence[ObjectKey], results: Sequence[T], call: str) -> list[T]:
        """Check clause C2: one result per key."""
        if len(results) != len(keys):
            raise BackendError(
                f"tier {self._tier!r}: {call} returned {len(results)} results for {len(keys)} keys; "
                "clause C2 asks for one per key, in order"
            )
        return list(results)


def _put(outcomes: list[LoadOutcome], places: Sequence[int], new: Sequence[LoadOutcome]) -> None:
    """Replace the outcomes at some places."""
    for place, outcome in zip(places, new, strict=True):
        outcomes[place] = outcome


async def answer(call: Awaitable[T]) -> T:
    """Await a backend's call. If the backend cancels its own call, that is a failure like any other."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BackendError("the backend cancelled its own call") from None
