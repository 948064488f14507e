"""Media that refuse to delete some objects, or are slow to list them."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.capacity import pending_evictions
from offload_backend_nfs.capacity.ports import Removal
from offload_backend_nfs.lookup_cache import LookupCache
from offload_backend_nfs.medium_adapter import MediumAdapter
from offload_backend_nfs.storage.base import Medium
from offload_backend_nfs.storage.failures import DeletionRefusedError
from offload_backend_nfs.storage.fsspec_store import ObjectStore
from offload_backend_nfs.storage.layout import name_of
from offload_backend_nfs.storage.posix import PosixShare
from offload_backend_nfs.storage.retry import Retrier
from offload_backend_nfs.storage.s3 import S3Store

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.nfs.calls import load, run, store
from tests.backends.nfs.capacity.simulation import World
from tests.backends.nfs.capacity.test_capacity import GRACE, LEASE, OPTIONS, STORED, existing, joined, pass_time, put
from tests.backends.nfs.capacity.test_capacity_damage import CAPACITY, SIZE, store_at_last
from tests.backends.nfs.conftest import Nfs, key
from tests.backends.nfs.unprivileged_engine import path_of


def test_stores_go_on_beside_an_object_that_cannot_be_deleted(
    nfs: Nfs, memory_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offload_backend_nfs.capacity.reservations._SHORTEST_STEP_SECONDS", 0.01)
    root = memory_folder / "kv"
    options = {"url": f"file://{root}", "capacity": CAPACITY, "eviction_grace": 0.1, "lease_seconds": 1}
    refused = str(path_of(root, 0))
    real = os.unlink

    def unlink(path: Any, *arguments: Any, **named: Any) -> None:
        if str(path) == refused:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        real(path, *arguments, **named)

    async def work(backend: NfsBackend, first: int) -> None:
        for number in range(first, first + 12):
            await store_at_last(backend, number, bytes([number]) * SIZE)
        assert await load(backend, 0, SIZE) == (LoadOutcome.HIT, bytes(SIZE))
        assert sum(path.stat().st_size for path in root.rglob("*.kv")) <= CAPACITY

    run(nfs(**options), lambda backend: store(backend, (0, bytes(SIZE))))
    os.utime(refused, (0, 0))  # the next victim
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "unlink", unlink)
        run(nfs(**options), partial(work, first=1))
        (line,) = [record.getMessage() for record in caplog.records]
        assert "refuses to delete 1 objects" in line
        run(nfs(**options), partial(work, first=20))


def test_a_refused_object_counts_and_is_tried_again_later() -> None:
    world = World()
    host = joined(world)
    put(host, range(10))
    world.refused = {key(number) for number in range(10)}
    pass_time(world, [host], 2 * GRACE)
    assert existing(world) == list(range(10))
    assert not host.bounded_store._evictions.refusals.keys - world.refused
    world.refused = set()
    pass_time(world, [host], 600 + 2 * GRACE)
    assert len(existing(world)) == 8
    assert host.bounded_store.state.occupied_bytes == world.real_bytes
    assert put(host, [20]) == [STORED]


def test_a_refused_deletion_on_request_is_an_error_and_the_account_goes_on() -> None:
    world = World()
    host = joined(world)
    put(host, range(3))
    world.refused = {key(1)}
    with pytest.raises(PermissionError):
        host.do(partial(host.discard, [key(0), key(1), key(2)]))
    assert existing(world) == [1]
    assert not host.bounded_store.state.pending_evictions
    assert not host.bounded_store.hidden([key(1)])[0]
    host.do(host.bounded_store.step)
    assert host.bounded_store.state.occupied_bytes == world.real_bytes == 100


def test_a_failed_medium_is_no_refusal() -> None:
    world = World()
    host = joined(world)
    put(host, range(3))
    host.start(partial(host.discard, [key(0)]))
    while not host.bounded_store.state.pending_evictions:
        host.advance()
    while host.busy:
        host.fail_next = "before"
        host.advance()
    assert not host.bounded_store._evictions.refusals.keys
    host.do(host.bounded_store.step)
    assert existing(world) == [1, 2]


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EROFS, errno.EIO, errno.ETIMEDOUT])
def test_a_deletion_that_fails_for_a_moment_is_no_refusal_and_the_order_stays(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    host = joined(world)
    for one in range(10):
        put(host, [one])
        world.seconds += 1
    errors, real = [OSError(number, "injected")], host.remove

    def remove(keys: Sequence[ObjectKey]) -> Removal:
        if errors:
            raise errors.pop()
        return real(keys)

    monkeypatch.setattr(host, "remove", remove)
    pass_time(world, [host], 2 * GRACE)
    assert not errors
    assert existing(world) == list(range(2, 10))
    assert "refuses to delete" not in caplog.text


class Deletions:
    """A medium with three objects, which answers the deletion of the first one or two with an error."""

    def __init__(self, medium: Medium, module: Any, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = [name_of(key(number)) for number in range(3)]
        self._medium = medium
        self._patch = module, function, getattr(module, function)
        self._monkeypatch = monkeypatch
        medium.open()

    def error_of(self, error: Exception, count: int, asked: int = 3) -> tuple[OSError, list[str]]:
        """Delete ``asked`` objects, of which ``count`` fail; return the error, and the objects that are left."""
        for name in self.names:
            self._medium.store(name, memoryview(b"object"))
        module, function, real = self._patch

        def delete(path: Any, *arguments: Any) -> None:
            if str(path).endswith(tuple(self.names[:count])):
                raise error
            real(path, *arguments)

        with self._monkeypatch.context() as patched:
            patched.setattr(module, function, delete)
            with pytest.raises(OSError) as caught:  # noqa: PT011 - any
                self._medium.delete(self.names[:asked])
        there = self._medium.sizes(self.names)
        return caught.value, [name for name, size in zip(self.names, there, strict=True) if size is not None]


@pytest.fixture(params=["share", "fsspec"])
def deletions(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deletions:
    if request.param == "share":
        return Deletions(PosixShare(tmp_path / "kv"), os, "unlink", monkeypatch)
    fs = MemoryFileSystem(skip_instance_cache=True)
    return Deletions(ObjectStore(fs, f"/{tmp_path.name}"), fs, "rm_file", monkeypatch)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EIO, errno.EBUSY])
def test_the_deletion_of_several_objects_names_those_that_are_refused(deletions: Deletions, number: int) -> None:
    for count in (1, 2):
        error, left = deletions.error_of(OSError(number, "injected"), count)
        assert isinstance(error, DeletionRefusedError)
        assert error.errno == number
        assert error.names == {*left} == {*deletions.names[:count]}
    error, _ = deletions.error_of(OSError(number, "injected"), 1, asked=1)
    assert isinstance(error, DeletionRefusedError)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ETIMEDOUT, errno.ENODEV])
def test_an_error_of_the_medium_is_no_refusal(deletions: Deletions, number: int) -> None:
    error, left = deletions.error_of(OSError(number, "injected"), 1)
    assert (type(error) is DeletionRefusedError, error.errno) == (False, number)
    assert left == deletions.names, "each further object could wait for its own time-out"


def test_a_medium_that_can_delete_none_of_several_objects_has_failed(deletions: Deletions) -> None:
    error, left = deletions.error_of(OSError(errno.EIO, "injected"), 2, asked=2)
    assert not isinstance(error, DeletionRefusedError)
    assert left == deletions.names
    error, _ = deletions.error_of(OSError(errno.EACCES, "injected"), 2, asked=2)
    assert isinstance(error, DeletionRefusedError)


@pytest.mark.parametrize(("code", "is_refusal"), [("AccessDenied", True), ("InternalError", False)])
def test_s3_refuses_the_keys_to_which_access_is_denied(
    nfs: Nfs, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, code: str, is_refusal: bool
) -> None:
    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"), (1, b"one"))
        medium = backend.medium
        assert isinstance(medium, S3Store)
        real, names = medium._call, [name_of(key(number)) for number in range(2)]

        def call(method: str, **arguments: Any) -> Any:
            refused, *others = arguments["Delete"]["Objects"]
            real(method, Delete={"Objects": others, "Quiet": True})
            return {"Errors": [{"Key": refused["Key"], "Code": code, "Message": "injected"}]}

        with monkeypatch.context() as patched:
            patched.setattr(medium, "_call", call)
            with pytest.raises(OSError, match=f"{code}: injected") as caught:
                await asyncio.to_thread(medium.delete, names)
        assert isinstance(caught.value, DeletionRefusedError) == is_refusal
        assert getattr(caught.value, "names", {names[0]}) == {names[0]}

    run(nfs(**s3_options), work)


@pytest.mark.parametrize("fails", [False, True], ids=["", "and one renewal fails"])
def test_a_process_keeps_its_lease_while_it_lists_one_large_folder(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, range(10))
    other.do(other.bounded_store.step)
    world.parts_per_page, world.seconds_per_part = 60, 2.0  # a page takes two leases
    housekeeper.start(housekeeper.bounded_store.step)
    before = world.seconds
    tries: list[float] = []
    real = housekeeper.write

    def write(name: str, content: bytes) -> None:
        if name.startswith("owners/"):
            tries.append(world.seconds)
            if fails and len(tries) == 2:
                raise OSError("injected")
        real(name, content)

    monkeypatch.setattr(housekeeper, "write", write)
    while housekeeper.busy:
        housekeeper.advance()
        other.do(other.bounded_store.step)
    assert world.seconds - before == 4 * 2 * LEASE
    assert len(tries) > 4 * 8
    assert all(later - earlier >= LEASE / 8 for earlier, later in itertools.pairwise(tries))
    assert housekeeper.bounded_store.is_housekeeper
    assert housekeeper.bounded_store.state.pending_evictions
    assert not caplog.text


def test_a_listing_tells_its_progress(tmp_path: Path) -> None:
    share = PosixShare(tmp_path / "kv")
    share.open()
    for number in range(50):
        share.store(name_of(ObjectKey("ab" * 32, "full-u256", bytes([7, number]) * 16)), memoryview(b"object"))
    told: list[None] = []
    adapter = MediumAdapter(share, Retrier(0), LookupCache(), 0)
    assert [len(page) for page in adapter.pages(lambda: told.append(None))] == [50]
    assert len(told) >= 50


def test_the_uses_beside_a_pending_batch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_evictions, "_MAX_USED_KEYS", 5)
    world = World()
    host = joined(world, OPTIONS)
    put(host, range(10))
    host.do(host.bounded_store.step)
    assert host.bounded_store.state.pending_evictions
    keys: list[ObjectKey] = [key(number) for number in (*range(20, 40), 20)]
    for one in keys:
        host.bounded_store.mark_used([one])
    assert list(host.bounded_store._evictions._used_seconds) == keys[-5:]
