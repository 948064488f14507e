"""A tier's data path: reserve, encode or decode, move and verify a batch of objects.

Every answer of the backend is checked against clause C2 of the contract, one result per key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome, StoreReservation
from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.objects.departing_object import DepartingObject
from offload_core.tiers.calls.answer import awaitable
from offload_core.tiers.calls.lent_objects import Lent, LentObject, WantedObject
from offload_core.tiers.calls.one_per_key import one_per_key
from offload_core.tiers.compression import Damage, TierCodec, differ
from offload_core.tiers.staged_object import StagedObject, StoredForm

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARE_OF_FIRST_READ = 0.25
"""The largest part of a load's deadline that the first read may take for a second read to begin."""


class LoadEnd(NamedTuple):
    """The end of a load.

    Args:
        outcomes: one per object.
        stored_bytes: bytes of the hits, as the medium has them.
        read_twice: number of objects that were read a second time.
    """

    outcomes: list[LoadOutcome]
    stored_bytes: int
    read_twice: int = 0


class ObjectIO:
    """Moves batches of objects between staging memory and one tier's backend. Exceptions of the backend pass through.

    Args:
        label: the words for the tier in messages.
        on_eviction: called with the objects that the backend evicted for a store.
    """

    def __init__(
        self,
        label: str,
        backend: Backend[Any],
        codec: TierCodec,
        limits: Limits,
        on_eviction: Callable[[Sequence[ObjectKey]], None],
    ) -> None:
        self._label = label
        self._backend = backend
        self._codec = codec
        self._names = codec.names
        self._limits = limits
        self._shared = backend.capabilities.shared
        self._sizes = backend.capabilities.sizes
        self._spares = backend.capabilities.spares
        self._loads_in_one_call = backend.loads_in_one_call
        self._on_eviction = on_eviction

    @property
    def seals_stores(self) -> bool:
        """True if :meth:`store` takes unsealed objects."""
        return self._backend.seals_stores and not (self._codec.compresses or self._codec.encrypts)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether the object is there."""
        return [form is not None for form in await self._forms_of(keys)]

    async def _forms_of(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return, per key, the form of :class:`StoredNames` in which the object is there; ``None`` if it is absent."""
        found: list[int | None] = [None] * len(keys)
        for form in self._names.forms:
            absent = [index for index, place in enumerate(found) if place is None]
            if absent:
                names = self._names.of([keys[index] for index in absent], form)
                there = await self._each(names, self._backend.contains(names), "contains", bool)
                for index, is_there in zip(absent, there, strict=True):
                    found[index] = form if is_there else None
        return found

    async def load(self, objects: Sequence[StagedObject], staging: TierShare | None) -> LoadEnd:
        """Load and verify objects.

        A damaged object of a shared medium is read a second time, into the same memory, since it will be deleted for
        all hosts. It is ``CORRUPT`` only if both reads brought the same damage. Otherwise it is kept: it is a hit if
        the second read was sound, and else a miss. It is a miss as well if the first read took so long that a second
        one could miss the load's deadline.
        """
        damage: dict[ObjectKey, Damage] = {}
        began = time.monotonic()
        outcomes, nbytes = await self._load_once(objects, staging, damage)
        damaged = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.CORRUPT]
        seconds = time.monotonic() - began
        if not self._shared or not damaged:
            self._log_deletions(objects, outcomes, damage)
            return LoadEnd(outcomes, nbytes)
        again = [objects[index] for index in damaged]
        second_damage: dict[ObjectKey, Damage] = {}
        in_time = seconds < self._limits.load_seconds(sum(one.lease.nbytes for one in objects)) * _SHARE_OF_FIRST_READ
        if in_time:
            for lease in (lease for staged in again for lease in (staged.lease, staged.scratch) if lease is not None):
                np.frombuffer(lease.view, np.uint8).fill(0)  # a read that brings too little differs from the first
            second, more_bytes = await self._load_once(again, staging, second_damage)
            nbytes += more_bytes
        else:
            second = [LoadOutcome.MISS] * len(again)
        for place, (staged, outcome) in enumerate(zip(again, second, strict=True)):
            if outcome is LoadOutcome.CORRUPT and differ(damage.get(staged.key), second_damage.get(staged.key)):
                second[place] = LoadOutcome.MISS
        _put(outcomes, damaged, second)
        self._log_deletions(objects, outcomes, damage)
        return LoadEnd(outcomes, nbytes, len(again) if in_time else 0)

    def _log_deletions(
        self, objects: Sequence[StagedObject], outcomes: Sequence[LoadOutcome], damage: dict[ObjectKey, Damage]
    ) -> None:
        for staged, outcome in zip(objects, outcomes, strict=True):
            found = damage.get(staged.key)
            if outcome is LoadOutcome.CORRUPT:
                reason = found.reason if found else f"{staged.key} is damaged or has another size, says the backend"
                logger.warning("%s: damaged object, deleting it: %s", self._label, reason)
            elif found is not None:
                logger.warning(
                    "%s: a read has brought other bytes than the medium has, or is too late to be repeated; the "
                    "object stays: %s",
                    self._label, found.reason,
                )  # fmt: skip

    async def _load_once(
        self, objects: Sequence[StagedObject], staging: TierShare | None, damage: dict[ObjectKey, Damage]
    ) -> tuple[list[LoadOutcome], int]:
        """Load and verify objects.

        Args:
            damage: gets the reasons of objects that are ``CORRUPT``.

        Returns:
            One outcome per object, and the bytes of the hits as the medium has them.
        """
        outcomes, nbytes = [LoadOutcome.MISS] * len(objects), 0
        for form in self._names.forms:
            missing = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.MISS]
            if missing:
                wanted = [objects[index] for index in missing]
                names = self._names.of([staged.key for staged in wanted], form)
                found, more_bytes = await self._load(wanted, names, staging, damage)
                _put(outcomes, missing, found)
                nbytes += more_bytes
        return outcomes, nbytes

    async def _load(
        self,
        objects: Sequence[StagedObject],
        names: Sequence[ObjectKey],
        staging: TierShare | None,
        damage: dict[ObjectKey, Damage],
    ) -> tuple[list[LoadOutcome], int]:
        """Load and verify objects under these names."""
        scratch: list[Lease] = []
        try:
            if not self._loads_in_one_call or self._codec.compresses:  # compressed objects have sizes of their own
                return await self._load_in_steps(objects, names, staging, scratch, damage)
            outcomes, nbytes, other_sizes = await self._load_in_one_call(objects, names, staging, scratch, damage)
            if other_sizes:  # damaged, or compressed under another configuration
                others = [objects[index] for index in other_sizes], [names[index] for index in other_sizes]
                again, more_bytes = await self._load_in_steps(*others, staging, scratch, damage)
                _put(outcomes, other_sizes, again)
                nbytes += more_bytes
            return outcomes, nbytes
        finally:
            for lease in scratch:
                lease.release()

    async def _load_in_one_call(
        self,
        objects: Sequence[StagedObject],
        names: Sequence[ObjectKey],
        staging: TierShare | None,
        scratch: list[Lease],
        damage: dict[ObjectKey, Damage],
    ) -> tuple[list[LoadOutcome], int, list[int]]:
        """Load objects that are not compressed; the backend's threads check their parts as they arrive.

        An object whose check has not passed is verified afterwards: the backend may not have told of all its parts.

        Returns:
            One outcome per object, the bytes of the hits, and the places of the objects that did not fit their buffers.
        """
        targets = [
            self._codec.load_target(staged, name, staged.lease.nbytes, staging, scratch, damage)
            for staged, name in zip(objects, names, strict=True)
        ]
        forms = [target for target in targets if isinstance(target, StoredForm)]
        form_names = [form.name for form in forms]
        checks = [self._codec.arriving(form) for form in forms]
        call = self._backend.load_and_check(form_names, [form.view for form in forms], checks)
        loaded = iter(await self._each(form_names, call, "load_and_check", LoadOutcome))
        outcomes = [next(loaded) if isinstance(target, StoredForm) else target for target in targets]
        other_sizes = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.CORRUPT]
        places = [index for index, target in enumerate(targets) if isinstance(target, StoredForm)]
        left = [
            (index, form)
            for index, form, check in zip(places, forms, checks, strict=True)
            if outcomes[index] is LoadOutcome.HIT and not check.passed
        ]
        if left:
            left_forms = [form for _, form in left]
            decoded = await self._codec.decode(left_forms, [LoadOutcome.HIT] * len(left), self._backend, damage)
            _put(outcomes, [index for index, _ in left], decoded)
        nbytes = sum(one.lease.nbytes for one, got in zip(objects, outcomes, strict=True) if got is LoadOutcome.HIT)
        return outcomes, nbytes, other_sizes

    async def _load_in_steps(
        self,
        objects: Sequence[StagedObject],
        names: Sequence[ObjectKey],
        staging: TierShare | None,
        scratch: list[Lease],
        damage: dict[ObjectKey, Damage],
    ) -> tuple[list[LoadOutcome], int]:
        """Load and verify objects of any form: ask for their sizes, load, and verify them afterwards."""
        reservation = await awaitable("prepare_load", self._backend.prepare_load(names))
        try:
            present = self._one_per_key(names, reservation.present, "prepare_load", bool)
            reported_sizes = reservation.nbytes if self._sizes else (None,) * len(names)
            sizes = self._one_per_key(names, reported_sizes, "prepare_load (nbytes)", int, or_none=True)
            targets = [
                self._codec.load_target(staged, name, size, staging, scratch, damage) if there else LoadOutcome.MISS
                for staged, name, there, size in zip(objects, names, present, sizes, strict=True)
            ]
            wanted = [target for target in targets if isinstance(target, StoredForm)]
            decoded: list[LoadOutcome] = []
            if wanted:
                wanted_names = [form.name for form in wanted]
                call = self._backend.load_into(wanted_names, [form.view for form in wanted])
                loaded = await self._each(wanted_names, call, "load_into", LoadOutcome)
                decoded = await self._codec.decode(wanted, loaded, self._backend, damage)
            nbytes = sum(len(form.view) for form, got in zip(wanted, decoded, strict=True) if got is LoadOutcome.HIT)
            outcomes = iter(decoded)
            return [next(outcomes) if isinstance(target, StoredForm) else target for target in targets], nbytes
        finally:
            await reservation.release()

    async def encode(
        self, objects: Sequence[StagedObject], staging: TierShare | None, scratch: list[Lease]
    ) -> list[StoredForm | None]:
        """Return the form in which each object is to be stored; objects on the medium are not encoded again.

        Args:
            scratch: gets the leases of encoded objects, for the caller to release, also when this raises.
        """
        if not (self._codec.compresses or self._codec.encrypts):
            return [StoredForm(staged, staged.key, staged.lease.view) for staged in objects]
        found = await self._forms_of([staged.key for staged in objects])
        absent = [staged for staged, place in zip(objects, found, strict=True) if place is None]
        encoded = iter(await self._codec.encode(absent, self._backend, staging, scratch))
        forms: list[StoredForm | None] = []
        for staged, place in zip(objects, found, strict=True):
            if place is None:
                forms.append(next(encoded))
            else:  # if it vanishes meanwhile, a tier that encrypts must not store it as it is
                (name,) = self._names.of([staged.key], place)
                forms.append(StoredForm(staged, name, staged.lease.view, present=self._codec.encrypts))
        return forms

    async def store(self, forms: Sequence[StoredForm | None]) -> list[StoreOutcome | None]:
        """Store objects; the outcome of an object without a form is ``None``."""
        outcomes = iter(await self._store([form for form in forms if form is not None]))
        return [None if form is None else next(outcomes) for form in forms]

    async def _store(self, objects: Sequence[StoredForm]) -> list[StoreOutcome]:
        is_lent = [isinstance(form.staged.lease, LentObject) for form in objects]
        pairs = list(zip(objects, is_lent, strict=True))
        lent = iter(await self._store_prepared([form for form, has_memory in pairs if has_memory]))
        others = iter(await self._store_other([form for form, has_memory in pairs if not has_memory]))
        return [next(lent if has_memory else others) for has_memory in is_lent]

    async def _store_prepared(self, forms: Sequence[StoredForm]) -> list[StoreOutcome]:
        """Store objects whose capacity is reserved."""
        if not forms:
            return []
        names, buffers = [form.name for form in forms], [form.view.toreadonly() for form in forms]
        if any(form.staged.unsealed for form in forms):
            seals = [DepartingObject(form.view, form.name) for form in forms]
            try:
                call = self._backend.store_and_seal(names, buffers, seals)
                return await self._each(names, call, "store_and_seal", StoreOutcome)
            finally:
                for seal in seals:
                    seal.end()
        return await self._each(names, self._backend.store(names, buffers), "store", StoreOutcome)

    async def _store_other(self, objects: Sequence[StoredForm]) -> list[StoreOutcome]:
        """Reserve capacity for objects in staging memory, and store them."""
        if not objects:
            return []
        names = [form.name for form in objects]
        reservation = await self._prepare_store(
            names, [len(form.view) for form in objects], [form.staged.spare for form in objects]
        )
        try:
            granted = self._one_per_key(names, reservation.outcomes, "prepare_store", StoreOutcome, or_none=True)
            prepared = [
                StoreOutcome.ALREADY_PRESENT if form.present else outcome
                for form, outcome in zip(objects, granted, strict=True)
            ]
            wanted = [form for form, outcome in zip(objects, prepared, strict=True) if outcome is None]
            stored = iter(await self._store_prepared(wanted))
            return [next(stored) if outcome is None else outcome for outcome in prepared]
        finally:
            await reservation.release()

    async def _prepare_store(
        self, names: Sequence[ObjectKey], sizes: Sequence[int], spare: Sequence[bool]
    ) -> StoreReservation:
        """Reserve capacity, and report evicted objects."""
        more = [spare] if self._spares and any(spare) else []
        reservation = await awaitable("prepare_store", self._backend.prepare_store(names, sizes, *more))
        try:
            self._on_eviction(self._names.keys_of(reservation.evicted))
        except BaseException:
            await reservation.release()
            raise
        return reservation

    async def borrow(self, wanted: Sequence[WantedObject], *, verify: bool) -> Lent[LoadOutcome]:
        """Let the backend lend stored objects, and verify them where they are unless the borrower does so."""
        keys = [one.key for one in wanted]
        reservation = await awaitable("prepare_load", self._backend.prepare_load(keys))
        try:
            present = self._one_per_key(keys, reservation.present, "prepare_load", bool)
            views = self._one_per_key(keys, reservation.lend(), "prepare_load (lend)", memoryview, or_none=True)
            outcomes: list[LoadOutcome | None] = [None if there else LoadOutcome.MISS for there in present]
            # An object of another size is damaged, or has an older layout; an ordinary load finds out.
            fits = [view is not None and len(view) == one.nbytes for one, view in zip(wanted, views, strict=True)]
            places = [index for index, there in enumerate(present) if there and fits[index]]
            damage: dict[ObjectKey, Damage] = {}
            forms = [_lent_form(wanted[index].key, cast("memoryview", views[index])) for index in places]
            hits = [LoadOutcome.HIT] * len(forms)
            verified = await self._codec.decode(forms, hits, self._backend, damage) if verify else hits
            _put(outcomes, places, verified)
            self._log_deletions([form.staged for form in forms], verified, damage)
            lent = [view if got is LoadOutcome.HIT else None for view, got in zip(views, outcomes, strict=True)]
        except BaseException:
            await reservation.release()
            raise
        return Lent(outcomes, lent, reservation.release)

    async def reserve(self, wanted: Sequence[WantedObject]) -> Lent[StoreOutcome]:
        """Let the backend lend memory for objects that will be stored."""
        keys, sizes = [one.key for one in wanted], [one.nbytes for one in wanted]
        reservation = await self._prepare_store(keys, sizes, [one.spare for one in wanted])
        try:
            outcomes = self._one_per_key(keys, reservation.outcomes, "prepare_store", StoreOutcome, or_none=True)
            views = self._one_per_key(keys, reservation.lend(), "prepare_store (lend)", memoryview, or_none=True)
            usable = [
                view if outcome is None and view is not None and len(view) == nbytes and not view.readonly else None
                for view, outcome, nbytes in zip(views, outcomes, sizes, strict=True)
            ]
        except BaseException:
            await reservation.release()
            raise
        return Lent(outcomes, usable, reservation.release)

    async def _each(self, keys: Sequence[ObjectKey], call: Awaitable[Sequence[T]], name: str, kind: type) -> list[T]:
        return self._one_per_key(keys, await awaitable(name, call), name, kind)

    def _one_per_key(
        self, keys: Sequence[ObjectKey], results: Sequence[T], call: str, kind: type, *, or_none: bool = False
    ) -> list[T]:
        return one_per_key(keys, results, f"{self._label}: {call}", kind, or_none=or_none)


def _lent_form(key: ObjectKey, view: memoryview) -> StoredForm:
    """Return the form of an object that is verified where it is."""
    return StoredForm(StagedObject(key, LentObject(view)), key, view)


def _put(outcomes: list[T], places: Sequence[int], new: Sequence[T]) -> None:
    """Replace the outcomes at some places."""
    for place, outcome in zip(places, new, strict=True):
        outcomes[place] = outcome
