"""Cached lookups: the questions they save, and the delay until changes by other processes are visible."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.lookup_cache import LookupCache

from offload_core.api.backend import LoadOutcome, StoredObject
from tests.backends.nfs.calls import contains, load, run, store
from tests.backends.nfs.conftest import Nfs, key


def counted(backend: NfsBackend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list. It collects the names of all later questions to the medium."""
    asked: list[str] = []
    real = backend.medium.sizes

    def sizes(names: Sequence[str]) -> list[int | None]:
        asked.extend(names)
        return real(names)

    monkeypatch.setattr(backend.medium, "sizes", sizes)
    return asked


def remove_objects(root: Path) -> None:
    for path in root.rglob("*.kv"):
        path.unlink()


def object_file(root: Path, number: int) -> Path:
    (path,) = [path for path in root.rglob("*.kv") if path.stem == key(number).chunk_hash.hex()]
    return path


def test_lookups_are_answered_from_the_cache(nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: NfsBackend) -> None:
        asked = counted(backend, monkeypatch)
        assert await contains(backend, 0, 1, 0, 2) == [False] * 4
        assert len(asked) == 3, "each of them once"
        assert await contains(backend, 2, 1, 0) == [False] * 3
        assert len(asked) == 3, "absence is cached too"
        await store(backend, (1, b"one"))
        assert await contains(backend, 0, 1, 2) == [False, True, False]
        assert len(asked) == 3, "a store of this process is known at once"
        await backend.delete([key(1)])
        assert await contains(backend, 1) == [False]
        await store(backend, (1, b"one"))
        remove_objects(tmp_path)  # as another host would
        assert await contains(backend, 1) == [True]
        assert await load(backend, 1, 3) == (LoadOutcome.MISS, bytes(3))
        assert await contains(backend, 1) == [False], "a load that missed is known at once"
        assert len(asked) == 3
        assert await contains(backend, *range(300)) == [False] * 300
        assert len(asked) == 300

    run(nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=60), work)


def test_what_a_listing_names_is_no_longer_absent(nfs: Nfs, tmp_path: Path) -> None:
    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"), (1, b"one"))
        there = object_file(tmp_path, 0)
        there.rename(tmp_path / "away")
        assert await load(backend, 0, 4) == (LoadOutcome.MISS, bytes(4))
        assert await contains(backend, 0) == [False]
        (tmp_path / "away").rename(there)  # as another host would store it
        assert await contains(backend, 0) == [False], "the answer is cached"
        await backend.delete([key(1)])
        listed = [found.key async for batch in backend.list_objects() for found in batch]
        assert listed == [key(0)]
        assert await contains(backend, 0, 1) == [True, False]

    run(nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=60), work)


def test_a_listing_says_nothing_about_a_later_deletion() -> None:
    cache, began = LookupCache(), time.monotonic()
    cache.add_change(key(0), present=False, began_seconds=began)
    cache.add_listed([StoredObject(key(0), 5, 0.0)], began)
    assert cache.presence([key(0), key(1)], 60) == [False, None]
    cache.add_listed([StoredObject(key(0), 5, 0.0), StoredObject(key(1), 5, 0.0)], time.monotonic())
    assert cache.presence([key(0), key(1)], 60) == [True, None], "a listing adds no answers"


def test_a_cached_answer_expires(nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: NfsBackend) -> None:
        asked = counted(backend, monkeypatch)
        await contains(backend, 0)
        await asyncio.sleep(0.06)
        await contains(backend, 0)
        assert len(asked) == 2

    run(nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=0.05), work)


def test_without_a_lookup_cache_the_medium_is_asked_every_time(
    nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(backend: NfsBackend) -> None:
        asked = counted(backend, monkeypatch)
        await store(backend, (0, b"zero"))
        for _ in range(3):
            assert await contains(backend, 0) == [True]
        assert len(asked) == 3

    run(nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=0), work)


def test_c5_backends_of_one_process_see_each_others_stores_at_once(nfs: Nfs, tmp_path: Path) -> None:
    async def work(backend: NfsBackend) -> None:
        other = nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=60)
        await other.open()
        for writer, reader, number in [(backend, other, 0), (other, backend, 1)]:
            assert await contains(reader, number) == [False]
            await store(writer, (number, b"here"))
            assert await contains(reader, number) == [True]
            await reader.delete([key(number)])
            assert await contains(writer, number) == [False]
        await other.close()

    run(nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=60), work)


_OTHER = """
    import asyncio, sys
    from offload_backend_nfs import NfsBackend, NfsOptions
    from offload_core.api.backend import BackendContext
    from offload_core.api.keys import ObjectKey
    from offload_core.runtime.threads import DaemonExecutor

    async def main():
        backend = NfsBackend(NfsOptions(url=sys.argv[1]), BackendContext("other", DaemonExecutor(1, "other")))
        await backend.open()
        key = ObjectKey("ab" * 32, "full-u256", bytes(32))
        for line in sys.stdin:
            if line.strip() == "store":
                await backend.store([key], [memoryview(b"theirs")])
            else:
                await backend.delete([key])
            print("done", flush=True)
        await backend.close()

    asyncio.run(main())
"""


def test_changes_by_another_process_are_seen_within_the_life_of_an_answer(nfs: Nfs, tmp_path: Path) -> None:
    life_seconds = 0.5
    program = [sys.executable, "-c", textwrap.dedent(_OTHER), f"file://{tmp_path}/kv"]
    other = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None

    async def work(backend: NfsBackend) -> None:
        for command, present in [("store", True), ("delete", False)]:
            assert await contains(backend, 0) == [not present]
            print(command, file=other.stdin, flush=True)
            assert (await asyncio.to_thread(other.stdout.readline)) == "done\n"  # type: ignore[union-attr] # a pipe
            done = time.monotonic()
            while time.monotonic() < done + life_seconds:
                await contains(backend, 0)
                await asyncio.sleep(0.01)
            assert await contains(backend, 0) == [present], "all older answers are past their life"
            if present:
                assert await load(backend, 0, 6) == (LoadOutcome.HIT, b"theirs")

    try:
        run(nfs(url=f"file://{tmp_path}/kv", lookup_cache_seconds=life_seconds), work)
    finally:
        other.kill()
        other.communicate()


def test_an_answer_from_before_a_change_is_ignored() -> None:
    cache = LookupCache()
    asked = time.monotonic()
    cache.add_change(key(0), True, time.monotonic())
    cache.add_answer(key(0), False, asked)
    assert cache.presence([key(0)], 60) == [True]
    cache.add_answer(key(0), False, time.monotonic())
    assert cache.presence([key(0)], 60) == [False]


def test_after_overlapping_changes_presence_is_unknown() -> None:
    cache = LookupCache()
    began = time.monotonic()
    cache.add_change(key(0), True, time.monotonic())
    cache.add_change(key(0), False, began)
    assert cache.presence([key(0)], 60) == [None]


def test_a_change_that_failed_may_have_happened() -> None:
    cache = LookupCache()
    cache.add_answer(key(0), False, time.monotonic())
    cache.add_change(key(0), None, time.monotonic())
    assert cache.presence([key(0)], 60) == [None]


def test_old_answers_for_dropped_keys_are_ignored() -> None:
    cache = LookupCache(max_keys=2)
    asked = time.monotonic()
    for number in range(3):
        cache.add_change(key(number), True, time.monotonic())
    assert cache.presence([key(0), key(1), key(2)], 60) == [None, True, True]
    cache.add_answer(key(0), False, asked)
    assert cache.presence([key(0)], 60) == [None]


def test_storage_with_other_options_has_another_cache() -> None:
    one, same, other = (LookupCache.shared(storage) for storage in ("a", "a", "b"))
    assert one is same
    assert one is not other
