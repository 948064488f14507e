"""Tiers in the I/O process: they serve as on threads, and outlive the process."""

from __future__ import annotations

import base64
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config
from offload_core.io_process import process
from offload_core.io_process.control import ControlSocket
from offload_core.io_process.life.companion import MODULE, WITHHELD
from offload_core.io_process.session import Session
from offload_core.runtime.companion_process import CompanionProcess
from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.rig import OBJECT_BYTES, SECONDS, Rig, content, key
from tests.support.plugin_site import Site
from tests.support.polling import wait_until
from tests.support.process_state import io_process_ids, is_running, own_files

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT

Make = Callable[..., Rig]


@pytest.fixture
def make(io: IoLoop) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make_rig(*backends: dict[str, Any], **settings: Any) -> Rig:
        rigs.append(Rig.of(io, *backends, **settings))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


def disk(path: Path, **options: Any) -> dict[str, Any]:
    return {"name": "disk", "type": "disk", "path": str(path), **options}


FUSSY = """
from pathlib import Path

@hookimpl
def offload_wrap_backend(backend, tier):
    if Path({path!r}).exists():
        raise LookupError("out of order")
"""

SLOW = """
import time
from pathlib import Path

@hookimpl
def offload_wrap_backend(backend, tier):
    Path({path!r}, "begun").touch()
    while Path({path!r}, "slow").exists():
        time.sleep(0.01)
"""

COUNTING = """
from pathlib import Path
from offload_core.api.wrapper import BackendWrapper

class Counting(BackendWrapper):
    def note(self, kind, keys):
        with Path({path!r}).open("a") as file:
            print(kind, len(keys), file=file)

    async def load_and_check(self, keys, buffers, checks):
        self.note("load", keys)
        return await super().load_and_check(keys, buffers, checks)

    async def store(self, keys, buffers):
        self.note("store", keys)
        return await super().store(keys, buffers)

@hookimpl
def offload_wrap_backend(backend, tier):
    return Counting(backend)
"""

RAM = {"name": "ram", "type": "cpu", "capacity": "16MiB"}


def messages(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_objects_are_stored_found_and_loaded_by_the_process(make: Make, tmp_path: Path) -> None:
    rig = make(disk(tmp_path), RAM)
    for tier in (0, 1):
        assert rig.lookup(1, 2, tier=tier) == [False, False]
        assert rig.store(1, 2, tier=tier) == [True, True]
        assert rig.lookup(1, 2, 3, tier=tier) == [True, True, False]
        assert rig.load(1, 2, 3, tier=tier) == [HIT, HIT, MISS]
    assert [change.key for change in rig.tiers[1].take_changes() if change.present] == [key(1), key(2)]
    counts = rig.counters.take()
    assert counts["stores", "disk"] == counts["load_hits", "disk"] == 2
    assert len(list(tmp_path.rglob("*.kv"))) == 2


@pytest.mark.parametrize(
    ("kind", "sizes"), [("disk", [16, 16]), ("nfs", [32])], ids=["a disk gets parts", "a share gets it whole"]
)
def test_the_free_threads_divide_a_call_unless_the_medium_is_remote(
    make: Make, tmp_path: Path, site: Site, kind: str, sizes: list[int]
) -> None:
    counts = tmp_path / "counts"
    site.install("counting", COUNTING.format(path=str(counts)))
    place = {"path": str(tmp_path / "kv")} if kind == "disk" else {"url": (tmp_path / "kv").as_uri()}
    rig = make({"name": "files", "type": kind, "io_threads": 4, **place})
    numbers = range(32)
    assert rig.store(*numbers) == [True] * 32
    assert rig.load(*numbers) == [HIT] * 32
    assert counts.read_text().splitlines() == [f"{call} {size}" for call in ("store", "load") for size in sizes]


@pytest.mark.parametrize("compression", ["zstd", "zstd-planes"])
def test_compressed_objects_use_staging_memory_of_both_sides(make: Make, tmp_path: Path, compression: str) -> None:
    rig = make(disk(tmp_path, compression=compression))
    rig.share_out()
    assert rig.store(1, 2) == [True, True]
    assert rig.counters.take()["store_bytes", "disk"] < 1.2 * OBJECT_BYTES, "two objects"
    assert rig.load(1, 2, scratch=True) == [HIT, HIT]


def test_encrypted_objects_come_back_and_the_key_is_in_no_process_list(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = base64.b64encode(os.urandom(32)).decode()
    monkeypatch.setenv("OFFLOAD_CORE_DISK_ENCRYPTION_KEYS", f"now:{secret}")
    rig = make(disk(tmp_path, encryption="aes-256-gcm"))
    rig.share_out()
    assert rig.store(1, 2) == [True, True]
    assert rig.lookup(1, 2, 3) == [True, True, False]
    assert rig.load(1, 2, scratch=True) == [HIT, HIT]
    (path, _) = tmp_path.rglob("*.kv")
    assert path.parts[-3] == "full-u16-aes-now"
    assert content(1)[:64] not in path.read_bytes()
    assert secret.encode() not in Path(f"/proc/{rig.pid}/cmdline").read_bytes()


def test_credentials_of_the_engine_are_not_in_the_environment_of_the_process(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WITHHELD:
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of a bucket")
    rig = make(disk(tmp_path))
    assert rig.store(1) == [True]
    environment = Path(f"/proc/{rig.pid}/environ").read_bytes()
    assert b"sesame" not in environment
    assert b"AWS_SECRET_ACCESS_KEY=of a bucket" in environment


def test_a_damaged_object_is_deleted_and_its_log_line_is_in_the_engines_log(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(disk(tmp_path))
    rig.store(1)
    (path,) = tmp_path.rglob("*.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert rig.load(1) == [CORRUPT]
    assert rig.lookup(1) == [False]
    wait_until(lambda: "damaged object" in messages(caplog), "no log line")
    assert any(record.name.startswith("offload_core.tiers") for record in caplog.records)


def test_a_tier_that_cannot_be_opened_is_refused_with_the_words_of_its_backend(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend 'disk' cannot be opened: \[Errno 2\] .*'/proc/nothing'"):
        make(disk(Path("/proc/nothing")))


def test_the_process_is_small_and_imports_neither_torch_nor_vllm(make: Make, tmp_path: Path) -> None:
    rig = make(disk(tmp_path), RAM)
    status = Path(f"/proc/{rig.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(line.split()[1]) < 100 * 1024, "kB, without the objects of the cpu tier"
    maps = Path(f"/proc/{rig.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_a_script_may_pass_paths_in_its_configuration(make: Make, tmp_path: Path) -> None:
    rig = make({"name": "disk", "type": "disk", "path": tmp_path})
    assert rig.store(1) == [True]


def test_limits_of_the_process(make: Make, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    rig = make(disk(tmp_path), io_process_niceness=7, io_process_cpus=[cpu])
    assert os.getpriority(os.PRIO_PROCESS, rig.pid) == 7
    assert os.sched_getaffinity(rig.pid) == {cpu}


def test_the_process_ends_with_the_last_user(make: Make, tmp_path: Path, io: IoLoop) -> None:
    rig = Rig.of(io, disk(tmp_path))
    other = Rig.of(io, disk(tmp_path))
    pid = rig.pid
    assert other.pid == pid, "both halves of a connector share the process"
    rig.close()
    assert is_running(pid)
    other.close()
    assert not is_running(pid)


def test_two_configurations_of_one_engine_have_a_process_each(make: Make, tmp_path: Path) -> None:
    one, two = make(disk(tmp_path / "one")), make({**disk(tmp_path / "two"), "name": "other"})
    assert one.pid != two.pid
    assert one.store(1) == two.store(2) == [True]
    assert one.load(1) == two.load(2) == [HIT]


def test_a_process_per_tier(make: Make, tmp_path: Path) -> None:
    rig = make(disk(tmp_path), RAM, io_process="tier")
    pids = {process.pid for process in rig.processes.all}
    assert len(pids) == 2
    for tier in (0, 1):
        assert rig.store(1, tier=tier) == [True]
        assert rig.load(1, tier=tier) == [HIT]
    disks, rams = rig.processes.all
    pid = rams.pid
    assert disks.pid is not None
    os.kill(disks.pid, signal.SIGKILL)
    assert rig.load(1, tier=1) == [HIT], "the other tier's process is none the wiser"
    wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")
    assert rams.pid == pid


def test_nothing_is_left_if_the_engine_ends_while_a_process_is_replaced(io: IoLoop, tmp_path: Path) -> None:
    for _ in range(5):
        rig = Rig.of(io, disk(tmp_path))
        os.kill(rig.pid, signal.SIGKILL)
        wait_until(lambda rig=rig: rig.process.pid is None, "its end is not seen")  # type: ignore[misc]
        rig.close()
        wait_until(lambda: io_process_ids() == [], "a process is left")


def test_one_process_at_a_time_is_tried_while_it_cannot_serve(
    make: Make, tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("fussy", FUSSY.format(path=str(tmp_path / "out of order")))
    rig = make(disk(tmp_path / "kv"))
    rig.store(1)
    (tmp_path / "out of order").touch()
    os.kill(rig.pid, signal.SIGKILL)
    wait_until(lambda: messages(caplog).count("cannot be replaced") == 2, "it is not tried again")
    assert len(io_process_ids()) <= 1
    assert "out of order" in messages(caplog)
    (tmp_path / "out of order").unlink()
    wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")


def test_a_killed_process_is_replaced_and_the_disk_serves_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(disk(tmp_path), RAM)
    for tier in (0, 1):
        rig.store(1, 2, tier=tier)
    rig.tiers[1].take_changes()
    first = rig.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")
    assert rig.pid != first
    counts = rig.counters.take()
    assert counts["io_process_ends", "disk"] == counts["io_process_ends", "ram"] == 1
    lost = [(change.key, change.present) for change in rig.tiers[1].take_changes()]
    assert sorted(lost) == [(key(1), False), (key(2), False)], "objects in the memory of the process are gone"
    assert rig.lookup(1, tier=1) == [False], "the index believes in them"
    wait_until(lambda: rig.store(1, tier=1) == [True], "the memory does not serve again")
    assert rig.load(1, tier=1) == [HIT]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "one line"
    assert "the I/O process of tiers 'disk', 'ram' was killed by SIGKILL" in warnings[0].getMessage()
    assert all(tier.health.available for tier in rig.tiers)


def test_a_process_that_ends_before_the_tiers_are_made_does_not_end_the_start(make: Make, tmp_path: Path) -> None:
    first = make(disk(tmp_path))
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: first.process.pid is None, "its end is not seen")
    rig = make(disk(tmp_path))
    assert rig.store(1) == [True]
    assert rig.load(1) == [HIT]


def test_a_process_that_ends_right_after_its_greeting_is_replaced(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Session.start
    ended: list[int] = []

    async def start(session: Session, seconds: float) -> None:
        await original(session, seconds)
        if not ended:
            assert session.pid is not None
            ended.append(session.pid)
            os.kill(session.pid, signal.SIGKILL)
            await session._over.wait()

    monkeypatch.setattr(Session, "start", start)
    rig = make(disk(tmp_path))
    assert rig.store(1) == [True]
    assert rig.pid not in ended


@pytest.fixture
def unkillable(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CompanionProcess]]:
    """The I/O processes that were to be killed. They live on, like a process in a call that not even SIGKILL ends."""
    spared: list[CompanionProcess] = []
    kill = CompanionProcess._kill_now
    monkeypatch.setattr(CompanionProcess, "_kill_now", lambda process: spared.append(process))  # as a method
    yield spared
    monkeypatch.setattr(CompanionProcess, "_kill_now", kill)
    for one in spared:
        one.kill()
        assert one.wait_gone(SECONDS)


def test_a_process_that_stands_still_while_tiers_are_made_and_cannot_be_killed_is_replaced(
    unkillable: list[CompanionProcess],
    make: Make,
    tmp_path: Path,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.install("slow", SLOW.format(path=str(tmp_path)))
    rig = make(disk(tmp_path / "kv"))
    (tmp_path / "begun").unlink()
    (tmp_path / "slow").touch()
    with monkeypatch.context() as patches:
        patches.setattr(process, "START_SECONDS", 5.0)
        os.kill(rig.pid, signal.SIGKILL)
        wait_until((tmp_path / "begun").exists, "the next process does not make the tier")
        stopped = io_process_ids()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "replaced: it did not make a tier within 5 s" in messages(caplog), "it is not given up")
    assert unkillable
    (tmp_path / "slow").unlink()
    wait_until(lambda: rig.load(1) == [MISS], "the tier does not serve again")
    assert rig.pid not in stopped


def test_a_process_that_was_killed_before_it_served_and_lives_on_is_replaced(
    unkillable: list[CompanionProcess], make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Session.start
    killed: list[int | None] = []

    async def start(session: Session, seconds: float) -> None:
        await original(session, seconds)
        if not killed:
            killed.append(session.pid)
            session.kill()

    monkeypatch.setattr(Session, "start", start)
    rig = make(disk(tmp_path))
    assert rig.store(1) == [True]
    assert rig.pid not in killed


def test_a_relative_path_means_the_same_folder_after_a_replacement(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rig = make(disk(Path("kv")))
    assert rig.store(1) == [True]
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path / "results")
    os.kill(rig.pid, signal.SIGKILL)
    wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")
    assert list((tmp_path / "results").iterdir()) == []


def test_the_process_is_replaced_although_its_start_folder_is_gone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    rig = make(disk(tmp_path / "kv"))
    assert rig.store(1) == [True]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start").rmdir()
    os.kill(rig.pid, signal.SIGKILL)
    wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")


def test_an_engine_that_gets_no_process_is_told_so(
    make: Make, tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("fussy", FUSSY.format(path=str(tmp_path / "out of order")))
    first = make(disk(tmp_path / "kv"))
    (tmp_path / "out of order").touch()
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: first.process.pid is None, "its end is not seen")
    monkeypatch.setattr(process, "START_SECONDS", 2.0)
    with pytest.raises(ConfigError, match="the I/O process has ended during the start of the engine"):
        make(disk(tmp_path / "kv"))


def test_an_engine_that_has_no_thread_for_the_start_is_told_so(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("companion-"):
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ConfigError, match="did not start: can't start new thread; set io_process to off"):
        make(disk(tmp_path))


def test_an_error_at_the_start_is_told_however_long_it_is() -> None:
    (control, theirs), (log, their_log) = ControlSocket.pair(), ControlSocket.pair()
    settings = {"protocol": "\N{GRINNING FACE}" * 20_000, "log_level": "INFO", "config": {}}
    descriptors = {"control": theirs.fileno(), "log": their_log.fileno()}
    child = CompanionProcess(MODULE, descriptors=descriptors, payload=json.dumps(settings).encode())
    child.start(SECONDS)
    for end in (theirs, their_log):
        end.close()
    received = control.receive()
    assert received is not None
    assert received[0]["failed"].startswith("ProtocolError: the engine speaks version \N{GRINNING FACE}")
    assert child.wait_gone(SECONDS)
    for end in (control, log):
        end.close()


def test_a_process_that_does_not_answer_during_the_start_is_named(
    io: IoLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig.of(io, disk(tmp_path), shares_staging=False)
    monkeypatch.setattr(process, "START_SECONDS", 0.2)
    os.kill(rig.pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            ConfigError, match=r"backend 'disk' cannot be .*: the I/O process has not made it within 0.2 s"
        ):
            Rig.of(io, disk(tmp_path), shares_staging=False)
        with pytest.raises(TimeoutError, match=r"has not mapped the staging memory within 0.2 s"):
            rig.share_staging()
    finally:
        os.kill(rig.pid, signal.SIGCONT)
        rig.close()


def test_a_start_that_takes_too_long_is_told_in_words(
    io: IoLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"backends": [disk(tmp_path)]})
    monkeypatch.setattr(process, "START_SECONDS", 0.001)  # no interpreter begins so fast
    started = process.IoProcess.acquire("slow", io, config)
    try:
        with pytest.raises(TimeoutError, match=r"^it did not serve within 0.001 s$"):
            started._starting.result(SECONDS)
    finally:
        started.release(SECONDS)


def test_processors_that_are_not_there_are_refused_by_their_key(io: IoLoop, tmp_path: Path) -> None:
    own = str(sorted(os.sched_getaffinity(0)))
    words = r"- io_process_cpus: .* none of the processors \[4096\] .*; the engine uses " + re.escape(own)
    with pytest.raises(ConfigError, match=words):
        Rig.of(io, disk(tmp_path), io_process_cpus=[4096])


def test_staging_memory_that_is_shared_while_a_process_is_replaced_reaches_the_next_one(
    make: Make, tmp_path: Path, site: Site
) -> None:
    site.install("slow", SLOW.format(path=str(tmp_path)))
    rig = make(disk(tmp_path / "kv"), shares_staging=False)
    (tmp_path / "begun").unlink()
    (tmp_path / "slow").touch()
    os.kill(rig.pid, signal.SIGKILL)
    wait_until((tmp_path / "begun").exists, "the next process does not make the tier")
    rig.share_staging()
    (tmp_path / "slow").unlink()
    wait_until(lambda: rig.process.pid is not None, "it is not replaced")
    wait_until(lambda: rig.store(1) == [True], "the tier does not serve again")
    assert rig.load(1) == [HIT]


def test_the_process_may_end_while_staging_memory_is_shared(make: Make, tmp_path: Path) -> None:
    rig = make(disk(tmp_path), shares_staging=False)
    pid, before = rig.pid, own_files()["/memfd:test (deleted)"]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        sharing = threads.submit(rig.share_staging)
        wait_until(lambda: own_files()["/memfd:test (deleted)"] > before, "it is not shared")
        os.kill(pid, signal.SIGKILL)
        sharing.result(SECONDS)
    wait_until(lambda: rig.process.pid not in (None, pid), "it is not replaced")
    wait_until(lambda: rig.store(1) == [True], "the tier does not serve again")
    assert rig.load(1) == [HIT]


def test_the_process_may_have_ended_unseen_when_staging_memory_is_shared(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(disk(tmp_path), shares_staging=False)
    pid, submit, submitted, killed = rig.pid, rig.io.submit, threading.Event(), threading.Event()

    def submit_and_tell(work: Coroutine[Any, Any, Any]) -> Future[Any]:
        future = submit(work)
        submitted.set()
        return future

    def hold_the_loop() -> None:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "it lives")
        killed.set()
        assert submitted.wait(SECONDS)

    monkeypatch.setattr(rig.io, "submit", submit_and_tell)
    rig.io.loop.call_soon_threadsafe(hold_the_loop)
    assert killed.wait(SECONDS)
    rig.share_staging()
    wait_until(lambda: rig.process.pid not in (None, pid), "it is not replaced")
    wait_until(lambda: rig.store(1) == [True], "the tier does not serve again")
    assert rig.load(1) == [HIT]


def test_nothing_of_a_process_that_has_ended_waits_for_the_garbage_collector(make: Make) -> None:
    rig = make(RAM)
    before = own_files()
    # As vLLM does: the collector never looks again at the objects that are there now. Nobody undoes it, because later
    # collections would then look at all that was imported, for half a second each.
    gc.freeze()
    pid = rig.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rig.process.pid not in (None, pid), "no other process takes over")
    wait_until(lambda: rig.lookup(1) == [False], "it does not serve")
    assert own_files() - before == Counter()


def test_calls_under_way_fail_when_the_process_is_gone(make: Make, tmp_path: Path) -> None:
    rig = make(disk(tmp_path))
    rig.store(1)
    pid = rig.pid
    os.kill(pid, signal.SIGSTOP)
    waiting = rig.begin(rig.tiers[0].start_load, [])
    lookup = rig.io.submit(rig.tiers[0].lookup([key(1)]))
    rig.settle()
    assert not (waiting.done())
    assert not (lookup.done())
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(SECONDS) == []
    assert lookup.result(SECONDS) == [False]
    assert not is_running(pid)
    assert rig.tiers[0].health.available


def test_a_stopped_process_is_killed_and_replaced(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = make(disk(tmp_path), io_process_timeout_seconds=2)
    rig.store(1)
    pid = rig.pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: not is_running(pid), "the stopped process lives")
    assert time.monotonic() - began < 10
    wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")
    assert f"(pid {pid}) has not answered for 2 s" in messages(caplog)


@pytest.mark.long
def test_a_process_that_keeps_ending_is_replaced_after_growing_pauses(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(disk(tmp_path))
    rig.store(1)
    for _ in range(3):
        pid = rig.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: rig.process.pid not in (None, pid), "it is not replaced")  # type: ignore[misc]
        wait_until(lambda: rig.load(1) == [HIT], "the disk does not serve again")
    lines = [line for line in messages(caplog).splitlines() if "SIGKILL" in line]
    pauses = [line.rsplit("replaced in ", 1)[1] for line in lines]
    assert pauses == ["0 s.", "0.5 s.", "1 s."]


def test_the_process_ends_when_the_engine_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.rig import Rig
rig = Rig.of(IoLoop.acquire(), {disk(tmp_path / "kv")!r})
print(rig.pid, flush=True)
time.sleep(600)
"""
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        assert is_running(pid)
        engine.kill()
        wait_until(lambda: not is_running(pid), "the I/O process outlives the engine")
    finally:
        engine.kill()
        engine.wait()
        if engine.stdout is not None:
            engine.stdout.close()


FORK = """
import os, sys
import torch
torch.set_num_threads(1)  # a fork has none of torch's threads, and would wait for them
from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.rig import Rig, SECONDS
BACKEND = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
io = IoLoop.acquire()
rig = Rig.of(io, BACKEND)
print(rig.store(1), flush=True)
if (pid := os.fork()) == 0:
    own = Rig.of(IoLoop.acquire(), BACKEND)
    print(own.load(1), own.store(2), own.load(2), flush=True)
    rig.processes.release(SECONDS)
    io.release()
    print(own.load(2), flush=True)
    own.close()
    own.io.release()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(rig.load(1, 2))
rig.close()
io.release()
"""


def test_a_fork_of_the_engines_process_can_have_an_engine_of_its_own() -> None:
    """It has the same name here, so that it joins the I/O process like any other process of an engine."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=SECONDS * 4)
    lines = ["[True]", f"[{HIT!r}] [True] [{HIT!r}]", f"[{HIT!r}]", "3", f"[{HIT!r}, {HIT!r}]"]
    assert done.stdout.splitlines() == lines, done.stderr


def test_nothing_is_left_behind(io: IoLoop, tmp_path: Path) -> None:
    def open_files() -> int:
        gc.collect()  # a mapping has a descriptor of its own until the last view of it is gone
        return len(list(Path("/proc/self/fd").iterdir()))

    rig = Rig.of(io, disk(tmp_path))
    rig.close()
    rig.memory.close()
    before = open_files()
    for _ in range(3):
        rig = Rig.of(io, disk(tmp_path))
        rig.store(1)
        os.kill(rig.pid, signal.SIGKILL)
        wait_until(lambda rig=rig: rig.load(1) == [HIT], "the disk does not serve again")  # type: ignore[misc]
        rig.close()
        rig.memory.close()
    assert open_files() <= before
