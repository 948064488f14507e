"""Damaged and foreign control files of a capacity: each is set aside, and the tier goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.capacity.account_state import AccountState, EvictionBatch, Member, decode, encode
from offload_backend_nfs.capacity.control_record import compress, seal

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.nfs.calls import load, run, store
from tests.backends.nfs.capacity.simulation import World
from tests.backends.nfs.capacity.test_capacity import GRACE, LEASE, existing, joined, pass_time, put
from tests.backends.nfs.conftest import Nfs, key

STORED = StoreOutcome.STORED
KIB, MIB = 1024, 1024 * 1024
CAPACITY = MIB
SIZE = 150 * KIB
NAME = "feedfacefeedface"
OTHER_NAME = "0123456789abcdef"


def old_form(content: bytes) -> bytes:
    return json.dumps({key(0).path: 100}).encode()


def of_a_path(path: str) -> Callable[[bytes], bytes]:
    def make(content: bytes) -> bytes:
        return seal("condemned", f"{path} 100\n".encode(), NAME)

    return make


BATCH_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut by a line": lambda content: content[: content.rindex(b"\n", 0, -1) + 1],
    "a bit": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "nested": lambda content: b"[" * 200_000,
    "without a checksum": old_form,
    "of another name": lambda content: seal("condemned", content.partition(b"\n")[2], OTHER_NAME),
    "outside": of_a_path("../victim/abcd"),
    "absolute": of_a_path("/etc/passwd"),
    "no digits": of_a_path(f"{'ab' * 32}/full-u256/zz"),
}


@pytest.mark.parametrize("damage", BATCH_DAMAGE)
@pytest.mark.parametrize("restarted", [False, True], ids=["beside a live process", "before the next process"])
def test_a_damaged_eviction_batch_of_a_dead_process_is_given_up(
    damage: str, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    evictor = joined(world)
    hosts = [] if restarted else [joined(world)]
    put(evictor, range(10))
    evictor.do(evictor.bounded_store.step)
    (batch,) = evictor.bounded_store.state.pending_evictions
    evictor.kill()
    content = world.files[f"condemned/{batch}"]
    world.files[f"condemned/{batch}"] = BATCH_DAMAGE[damage](content).replace(NAME.encode(), batch.encode())
    with caplog.at_level(logging.WARNING):
        host = (hosts or [joined(world)])[0]
        pass_time(world, [host], GRACE + 6 * LEASE)
        for number in range(20, 30):
            if put(host, [number]) == [STORED]:
                break
            pass_time(world, [host], 10)
        else:
            raise AssertionError("nothing can be stored any more")
        pass_time(world, [host], 2 * GRACE)
    assert host.bounded_store.state.occupied_bytes == world.real_bytes
    assert not host.bounded_store.state.pending_evictions
    assert [name for name in world.files if name.startswith("condemned/")] == []
    assert [name for name in world.files if name.startswith("damaged/")] == [f"damaged/condemned-{batch}"]
    assert len([record for record in caplog.records if "eviction batch" in record.getMessage()]) == 2, caplog.text


def test_a_batch_that_is_cut_while_it_is_deleted_is_counted_again() -> None:
    world = World()
    evictor, host = joined(world), joined(world)
    put(evictor, range(9))
    evictor.start(lambda: evictor.discard([key(0), key(1)]))
    while key(0) in world.objects and key(1) in world.objects:
        evictor.advance()
    (name,) = [name for name in world.files if name.startswith("condemned/")]
    evictor.kill()
    world.files[name] = b""
    pass_time(world, [host], 6 * LEASE)
    assert len(existing(world)) == 8
    assert host.bounded_store.state.occupied_bytes == world.real_bytes


def test_a_wrong_number_of_used_bytes_evicts_nothing() -> None:
    world = World()
    host = joined(world)
    put(host, range(8))
    number = max(int(name.removeprefix("account-")) for name in world.files if name.startswith("account-")) + 1
    wrong = host.bounded_store.state.model_copy(update={"used_bytes": 2**59})
    world.files[f"account-{number:020d}"] = encode(wrong)
    pass_time(world, [host], 3 * GRACE)
    assert existing(world) == list(range(8))
    assert host.bounded_store.state.occupied_bytes == world.real_bytes


def generations(account: Path) -> list[Path]:
    return sorted(path for path in account.glob("account-*") if path.name[8:].isdecimal() and len(path.name) == 28)


def next_generation(account: Path, ahead: int = 1) -> Path:
    return account / f"account-{int(generations(account)[-1].name[8:]) + ahead:020d}"


def plant_state(account: Path, **changes: Any) -> None:
    state = decode(generations(account)[-1].read_bytes())
    next_generation(account).write_bytes(encode(state.model_copy(update=changes)))


def bomb() -> bytes:
    compressor = zlib.compressobj(9)
    return b"".join(compressor.compress(bytes(MIB)) for _ in range(200)) + compressor.flush()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1500 * MIB)


def make(part: str, maker: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def plant(account: Path) -> None:
        (account / part).parent.mkdir(exist_ok=True)
        maker(account / part)

    return plant


def usage_logs(account: Path) -> None:
    folder = account / "touches"
    folder.mkdir(exist_ok=True)
    name = map("{:016x}".format, range(100))
    for body in (bomb(), zlib.compress(b"[" * 100_000), zlib.compress(b"[]"), b"", b"offload-core touches 1 \n"):
        (folder / next(name)).write_bytes(body)
    for lines in ("nan", "inf", "null", "[]", ""):
        sealed(folder / next(name), compress(f"{key(1).path} {lines}\n".encode()))
    sealed(folder / next(name), compress(b"../../etc/passwd 1.0\n"))
    sealed(folder / next(name), bomb())
    sealed(folder / next(name), b"not compressed")
    sparse(folder / next(name))
    os.mkfifo(folder / next(name))
    (folder / next(name)).mkdir()
    (folder / next(name)).symlink_to("/dev/zero")
    (folder / "notes.txt").write_text("by an operator")


def sealed(path: Path, body: bytes) -> None:
    path.write_bytes(seal("touches", body, path.name))


def batch_outside(account: Path) -> None:
    victim = account.parent.parent / "victim" / "ab" / "abcd.kv"
    victim.parent.mkdir(parents=True)
    victim.write_bytes(b"foreign")
    (account / "condemned").mkdir(exist_ok=True)
    (account / "condemned" / NAME).write_bytes(seal("condemned", b"../victim/abcd 1000\n", NAME))
    plant_state(account, pending_evictions={NAME: EvictionBatch(evictor=OTHER_NAME, nbytes=1000, phase="deleting")})


def batch_name_outside(account: Path) -> None:
    victim = account.parent.parent / "victim"
    victim.write_text("{}")
    plant_state(
        account, pending_evictions={"../../../victim": EvictionBatch(evictor=OTHER_NAME, nbytes=1, phase="deleting")}
    )


def member_outside(account: Path) -> None:
    (account.parent.parent / "victim").write_text("0")
    plant_state(account, members={"../../../victim": Member()})


def missing_batch(account: Path) -> None:
    plant_state(account, pending_evictions={NAME: EvictionBatch(evictor=OTHER_NAME, nbytes=9, phase="condemned")})


UNCHECKED = EvictionBatch(evictor=OTHER_NAME, nbytes=1, phase="condemned")
PLANTED: dict[str, Callable[[Path], Any]] = {
    "usage logs": usage_logs,
    "batch: outside": batch_outside,
    "batch: name outside": batch_name_outside,
    "batch: missing": missing_batch,
    "record: empty": lambda account: next_generation(account).write_bytes(b""),
    "record: fifo": lambda account: os.mkfifo(next_generation(account, 50)),
    "record: folder": lambda account: next_generation(account, 50).mkdir(),
    "record: sparse": lambda account: sparse(next_generation(account, 50)),
    "record: largest number": lambda account: (account / f"account-{'9' * 20}").write_bytes(b"garbage"),
    "record: copy with the largest number": lambda account: (account / f"account-{'9' * 20}").write_bytes(
        generations(account)[-1].read_bytes()
    ),
    "record: other digits": lambda account: (account / f"account-{'٣' * 20}").write_bytes(b"garbage"),
    "record: nested": lambda account: next_generation(account).write_bytes(seal("account", b"[" * 200_000)),
    "record: huge used bytes": lambda account: plant_state(account, used_bytes=10**30),
    "record: large used bytes": lambda account: plant_state(account, used_bytes=2**59),
    "record: negative used bytes": lambda account: plant_state(account, used_bytes=-(2**59)),
    "record: member outside": member_outside,
    "record: spared outside": lambda account: plant_state(
        account, pending_evictions={NAME: UNCHECKED.model_copy(update={"withdrawn": ("../../x",)})}
    ),
    "record: another account": lambda account: next_generation(account).write_bytes(encode(AccountState())),
    "lease: fifo": make(f"owners/{NAME}", os.mkfifo),
}


async def store_at_last(backend: NfsBackend, number: int, content: bytes) -> None:
    """Store an object, after some time if it is rejected: a lease or an eviction may come late."""
    for _ in range(400):
        if await store(backend, (number, content)) == [STORED]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"object {number} is not stored: {backend._bounded_store.state}")  # type: ignore[union-attr]


async def stores_again(backend: NfsBackend, first: int, count: int) -> None:
    """Store objects. More than six need evictions."""
    for number in range(first, first + count):
        await store_at_last(backend, number, bytes([number]) * SIZE)
    assert await load(backend, first + count - 1, SIZE) == (LoadOutcome.HIT, bytes([first + count - 1]) * SIZE)


@pytest.fixture(autouse=True)
def _quick_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_backend_nfs.capacity.reservations._SHORTEST_STEP_SECONDS", 0.01)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_foreign_or_damaged_control_file_stops_no_process(
    nfs: Nfs, memory_folder: Path, caplog: pytest.LogCaptureFixture, planted: str
) -> None:
    root = memory_folder / "kv"
    options = {
        **{"url": f"file://{root}", "capacity": CAPACITY, "lookup_cache_seconds": 0},
        **{"eviction_grace": 0, "lease_seconds": 0.6, "retry_seconds": 0.5},
    }

    async def work(backend: NfsBackend) -> None:
        for number, content in ((0, b"present"), (1, bytes(SIZE)), (2, bytes(SIZE))):
            await store_at_last(backend, number, content)
        PLANTED[planted](root / ".offload-core")
        assert await load(backend, 0, 7) == (LoadOutcome.HIT, b"present")
        await stores_again(backend, 100, 8)
        second = nfs(**options)
        await second.open()
        await stores_again(second, 150, 2)
        await second.close()

    with caplog.at_level(logging.WARNING):
        run(nfs(**options), work)
    assert len(caplog.records) <= 6, caplog.text
    if planted == "usage logs":
        assert len(list((root / ".offload-core" / "damaged").iterdir())) == 16
        assert (root / ".offload-core" / "touches" / "notes.txt").exists()
    if "outside" in planted and planted != "record: spared outside":
        assert (memory_folder / "victim").exists()
        assert planted != "batch: outside" or (memory_folder / "victim" / "ab" / "abcd.kv").exists()
    assert sum(path.stat().st_size for path in root.rglob("*.kv")) <= CAPACITY
    assert len(list((root / ".offload-core").iterdir())) < 50


def test_few_damaged_files_are_kept_and_told_in_one_line(
    nfs: Nfs, memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = memory_folder / "kv"
    logs = root / ".offload-core" / "touches"

    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"present"))
        logs.mkdir(exist_ok=True)
        for number in range(100):
            (logs / f"{number:016x}").write_bytes(b"damaged")
        await stores_again(backend, 100, 8)

    with caplog.at_level(logging.WARNING):
        run(nfs(url=f"file://{root}", capacity=CAPACITY, eviction_grace=0, lease_seconds=1), work)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "100 usage logs are damaged" in line
    assert len(list((root / ".offload-core" / "damaged").iterdir())) == 16
    assert not [path for path in logs.iterdir() if path.read_bytes() == b"damaged"]
