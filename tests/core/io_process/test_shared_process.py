"""The processes of one engine share an I/O process, its tiers and its objects, and survive each other."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.config.loading import load_config
from offload_core.io_process.control import BELLS, ControlSocket
from offload_core.io_process.life.meeting_point import MeetingPoint
from offload_core.io_process.messages import make_rings
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.border_rig import Medium
from tests.core.io_process.other_process import OtherProcess
from tests.core.io_process.rig import OBJECT_BYTES, Rig
from tests.support.plugin_site import Site
from tests.support.polling import wait_until
from tests.support.process_state import is_running

HIT = LoadOutcome.HIT
RAM = {"name": "ram", "type": "cpu", "capacity": "16MiB"}

Here = Callable[..., Rig]
There = Callable[..., OtherProcess]


def backends(folder: Path, ram: str = "16MiB", medium: Medium | None = None) -> list[dict[str, Any]]:
    first = {"name": "disk", "type": "disk", "path": str(folder)}
    if medium is not None:
        first = {"name": "medium", "type": "commanded", "path": str(medium.folder)}
    return [first, {**RAM, "capacity": ram}]


def keys(folder: Path, ram: str = "16MiB", **settings: Any) -> dict[str, Any]:
    return {"io_process": "engine", **settings, "backends": backends(folder, ram)}


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def engine() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def here(io: IoLoop, engine: str, tmp_path: Path) -> Iterator[Here]:
    """Makes a part of the engine in this process."""
    rigs: list[Rig] = []

    def make(**settings: Any) -> Rig:
        rigs.append(Rig(io, load_config(keys(tmp_path, **settings)), engine))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def there(engine: str, tmp_path: Path) -> Iterator[There]:
    """Makes a part of the engine in another process."""
    others: list[OtherProcess] = []

    def make(ram: str = "16MiB", medium: Medium | None = None, **settings: Any) -> OtherProcess:
        others.append(OtherProcess(engine, backends(tmp_path, ram, medium), **settings))
        return others[-1]

    yield make
    for other in others:
        other.close()


def served_again(rig: Rig, *numbers: int) -> None:
    wait_until(lambda: rig.load(*numbers) == [HIT] * len(numbers), "the disk does not serve again")


def served_again_there(other: OtherProcess, *numbers: int) -> None:
    wait_until(lambda: other.call("load", *numbers) == ["HIT"] * len(numbers), "the disk does not serve again")


def test_all_processes_of_an_engine_have_one_io_process_and_one_memory(here: Here, there: There) -> None:
    rig, first, second = here(), there(), there()
    assert rig.pid == first.io_process == second.io_process
    for tier in (0, 1):
        assert first.call("store", 1, 2, tier=tier) == [True, True]
        assert rig.lookup(1, 2, 3, tier=tier) == [True, True, False]
        assert rig.load(1, 2, tier=tier) == [HIT, HIT]
        assert rig.store(3, tier=tier) == [True]
        assert second.call("load", 1, 2, 3, tier=tier) == ["HIT"] * 3
    assert rig.store(1, tier=1) == [True], "it is there"
    assert rig.counters.take()["store_bytes", "ram"] == OBJECT_BYTES, "one object is new"


def test_an_eviction_is_told_with_the_end_of_its_store_although_the_event_loop_stands_still(here: Here) -> None:
    rig = here(ram="1MiB")
    assert all(rig.store(*range(10), tier=1))
    rig.tiers[1].take_changes()
    staged = rig.sealed(*range(10, 20))
    goes_on = threading.Event()
    rig.io.loop.call_soon_threadsafe(goes_on.wait, 30)
    try:
        assert all(rig.moved(rig.tiers[1].start_store, staged) or [False])
        gone = [change.key for change in rig.tiers[1].take_changes() if not change.present]
    finally:
        goes_on.set()
        for item in staged:
            item.lease.release()
    assert len(gone) >= 4, "of 20 objects at most 16 fit"


def test_an_eviction_is_told_to_the_process_that_has_stored_the_object_too(here: Here, there: There) -> None:
    rig, other = here(ram="1MiB"), there(ram="1MiB")
    assert rig.pid == other.io_process
    numbers = range(15)
    assert all(other.call("store", *numbers, tier=1))
    assert other.call("changes", 1) == [[number, True] for number in numbers]
    assert all(rig.store(*range(100, 110), tier=1))
    evicted: list[int] = []
    told: list[list[Any]] = []

    def is_told() -> bool:  # both messages may come after the answers to the stores
        evicted.extend(change.key.chunk_hash[-1] for change in rig.tiers[1].take_changes() if not change.present)
        told.extend(other.call("changes", 1))
        return 8 <= len(evicted) == len(told)

    wait_until(is_told, "the evictions are not told")
    assert told == [[number, False] for number in evicted]
    counts = rig.counters.take()
    assert counts["evictions", "ram"] == len(evicted)
    assert ("evictions_unread", "ram") not in counts, "the process that has stored them counts those"

    assert all(other.call("store", *range(200, 215), tier=1)), "for which those of this process are evicted"
    wait_until(lambda: rig.counters.take().get(("evictions_unread", "ram"), 0) > 0, "the eviction is not counted")


def test_a_process_that_dies_while_it_joins_leaves_nothing(here: Here, engine: str) -> None:
    rig = here()
    assert rig.store(1) == [True]
    meeting_point, pid = MeetingPoint(engine, rig.config.keys), rig.pid
    before = descriptors_of(pid)
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)  # so that it answers after the end
        connection = meeting_point.connect(0)
        assert connection is not None
        rings, bells, logs = make_rings(), [Doorbell() for _ in BELLS], ControlSocket.pair()
        numbers = [logs[1].fileno(), rings.descriptor, *(bell.fileno() for bell in bells)]
        ControlSocket(connection).send({"join": 1}, numbers)
        connection.close()
        rings.close()
        for bell in bells:
            bell.close()
        for end in logs:
            end.close()
        os.kill(pid, signal.SIGCONT)
        assert rig.load(1) == [HIT]
    wait_until(lambda: descriptors_of(pid) == before, "descriptors of dead processes are left")
    rig.close()
    assert not is_running(pid)


def test_a_process_without_a_parent_ends_although_a_call_hangs(there: There, tmp_path: Path, site: Site) -> None:
    site.declare("commanded", "commanded = tests.core.io_process.commanded")
    medium = Medium(tmp_path / "medium")
    parent, other = there(medium=medium), there(medium=medium)
    pid = parent.io_process
    assert other.io_process == pid
    assert other.call("store", 1) == [True]
    medium.shut("load")
    other.call("begin_load", 1)
    wait_until(lambda: bool(medium.running()), "no call hangs")
    parent.close()
    assert is_running(pid)
    other.kill()
    wait_until(lambda: not is_running(pid), "the I/O process outlives the engine")


def test_processes_of_other_engines_and_configurations_do_not_meet(here: Here, there: There, tmp_path: Path) -> None:
    rig = here()
    assert there(io_process_timeout_seconds=77).io_process != rig.pid
    stranger = OtherProcess("another engine", backends(tmp_path))
    assert stranger.io_process != rig.pid
    stranger.close()


def test_a_parent_that_leaves_first_leaves_the_process_to_the_others(here: Here, there: There) -> None:
    other = there()
    pid = other.io_process
    rig = here()
    assert rig.pid == pid
    assert other.call("store", 1, tier=1) == [True]
    other.close()
    assert rig.load(1, tier=1) == [HIT], "the memory of the process that the parent started"
    assert rig.pid == pid
    third = there()
    assert third.io_process == pid
    third.close()
    rig.close()
    wait_until(lambda: not is_running(pid), "the I/O process outlives the engine")


@pytest.mark.long
def test_a_process_that_has_lost_its_parent_ends_with_the_last_of_the_others(there: There) -> None:
    parent = there()
    pid = parent.io_process
    others = [there(), there()]
    assert [other.io_process for other in others] == [pid, pid]
    parent.close()
    others[0].kill()
    assert others[1].call("store", 1) == [True]
    assert is_running(pid)
    others[1].kill()
    wait_until(lambda: not is_running(pid), "the I/O process outlives the engine")


@pytest.mark.long
def test_the_end_of_the_parent_ends_the_process_and_the_next_one_is_shared_again(here: Here, there: There) -> None:
    parent = there()
    pid = parent.io_process
    rig, other = here(), there()
    assert rig.store(1) == [True]
    parent.kill()
    served_again(rig, 1)
    served_again_there(other, 1)
    assert not is_running(pid)
    assert rig.pid == other.io_process != pid


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_a_killed_or_stopped_process_is_replaced_by_one(
    here: Here, there: There, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    parent = there(io_process_timeout_seconds=2)
    pid = parent.io_process
    rig, other = here(io_process_timeout_seconds=2), there(io_process_timeout_seconds=2)
    assert rig.store(1) == [True]
    assert rig.store(1, tier=1) == [True]
    rounds = 1 if name == "SIGSTOP" else 2
    for _ in range(rounds):
        os.kill(pid, signal.Signals[name])
        wait_until(lambda pid=pid: not is_running(pid), "it lives")  # type: ignore[misc]
        served_again(rig, 1)
        served_again_there(other, 1)
        served_again_there(parent, 1)
        assert rig.pid == other.io_process == parent.io_process != pid
        pid = rig.pid
    own = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    lines = [line for line in (*parent.call("warnings"), *other.call("warnings"), *own) if "have failed" in line]
    assert len(lines) == rounds, "one process of the engine tells it"
    assert other.call("load", 1, tier=1) == ["MISS"]


def test_a_killed_process_of_the_engine_disturbs_no_other_and_leaves_nothing(here: Here, there: There) -> None:
    rig = here()
    assert rig.store(1, 2) == [True, True]
    pid = rig.pid

    before = descriptors_of(pid)
    for _ in range(3):
        other = there()
        assert other.io_process == pid
        other.begin("load", *[1, 2] * 20)
        other.kill()
        assert rig.load(1, 2) == [HIT, HIT]
    wait_until(lambda: descriptors_of(pid) == before, "descriptors of killed processes are left")
    assert rig.pid == pid


def test_strangers_at_the_meeting_point_disturb_nobody(here: Here, engine: str) -> None:
    rig = here()
    assert rig.store(1) == [True]
    meeting_point = MeetingPoint(engine, rig.config.keys)
    for sent in (None, b"", b"{", b'{"join": 1}', b"x" * 100_000):
        connection = meeting_point.connect(0)
        assert connection is not None
        with connection:
            if sent is not None:
                connection.send(sent)
    assert rig.load(1) == [HIT]
    with pytest.raises(ConnectionError):
        _silent(meeting_point, b'{"join": 1}')
    assert meeting_point.try_listen(0) is None


def _silent(meeting_point: MeetingPoint, sent: bytes) -> None:
    connection = meeting_point.connect(0)
    assert connection is not None
    with connection:
        connection.setblocking(True)
        connection.send(sent)
        if not connection.recv(100):
            raise ConnectionResetError("closed")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user_is_not_trusted(here: Here, engine: str, tmp_path: Path) -> None:
    squatter = f"""
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind({MeetingPoint(engine, load_config(keys(tmp_path)).keys)._address(0)!r})
listener.listen()
print("there", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", squatter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        rig = here()
        assert rig.store(1) == [True], "it has a process of its own"
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_join(here: Here, engine: str) -> None:
    rig = here()
    address = MeetingPoint(engine, rig.config.keys)._address(0)
    intruder = f"""
import os, socket
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
print(connection.recv(100))
"""
    result = subprocess.run([sys.executable, "-c", intruder], capture_output=True, text=True, check=False)
    assert result.stdout == "b''\n" or "ConnectionResetError" in result.stderr
    assert rig.store(1) == [True]
