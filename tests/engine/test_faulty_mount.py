"""The engine on a real file system that hangs, fails, lies and vanishes: the same output, each request in time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.labs import QUICK_LABS
from tests.engine.phases import Phase, PhasedRun
from tests.media.fuse.mount import FaultFs
from tests.support.engine.lab import Lab, count, ours
from tests.support.engine.spec import RunResult, logged_problems, logged_tracebacks

LOOKUP_SECONDS = LOAD_SECONDS = 4.0
"""Time for many calls of a file system in Python, on a busy machine; what hangs costs this time in each phase."""
SLACK_SECONDS = 10.0
"""For the recompute of a busy machine. What hangs here would hang for ever."""

MAX_PAUSE_SECONDS = 0.2
SETTLE_SECONDS = 10 * MAX_PAUSE_SECONDS
"""From when storage is well until it is asked: it has been probed by then."""

TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "disk": lambda folder: {"name": "files", "type": "disk", "path": str(folder / "kv")},
    "disk-bounded": lambda folder: {
        "name": "files", "type": "disk", "path": str(folder / "kv"), "capacity": "64MiB",
    },
    "nfs": lambda folder: {
        "name": "files", "type": "nfs", "url": (folder / "kv").as_uri(), "retry_seconds": 0.1,
        "lookup_cache_seconds": 0,
    },
}  # fmt: skip


def transfer(*tiers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Our connector with short deadlines, and short pauses for a tier that fails."""
    deadlines = {
        "breaker_pause_seconds": MAX_PAUSE_SECONDS / 2,
        "breaker_max_pause_seconds": MAX_PAUSE_SECONDS,
        "lookup_timeout_seconds": LOOKUP_SECONDS,
        "load_timeout_seconds": LOAD_SECONDS,
        "load_timeout_seconds_per_mib": 0,
    }
    return ours(Path("unused"), **{"backends": list(tiers), **deadlines, **keys})


def settle() -> None:
    """Give the tier the time that it takes to notice that its storage is well."""
    threading.Event().wait(SETTLE_SECONDS)


def _only(fault_fs: FaultFs, *rule: Any, **values: Any) -> Callable[[], None]:
    def act() -> None:
        fault_fs.clear()
        fault_fs.add(*rule, **values)

    return act


def _well(fault_fs: FaultFs) -> Callable[[], None]:
    def act() -> None:
        fault_fs.clear()
        fault_fs.resume()
        settle()

    return act


def _remove_all(fault_fs: FaultFs) -> None:
    for path in fault_fs.backing.rglob("*.kv"):
        path.unlink()


def _in_time(run: PhasedRun, result: RunResult) -> None:
    for phase in run.phases:
        seconds = run.slowest_seconds(result, phase.name)
        assert seconds < LOOKUP_SECONDS + LOAD_SECONDS + SLACK_SECONDS, (phase.name, seconds)


def _few_lines(lines: list[str], most: int) -> None:
    """What went wrong is told, by a line or two for each; what was damaged is told per object."""
    said = [line for line in logged_problems(lines) if "damaged object" not in line]
    assert 0 < len(said) <= most, said
    assert logged_tracebacks(lines) == []


LONG_KINDS = [pytest.param(kind, marks=pytest.mark.long) for kind in ("disk-bounded", "nfs")]


@pytest.mark.parametrize("kind", ["disk", *LONG_KINDS])
@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_a_file_system_that_hangs_and_vanishes(lab: Lab, fault_fs: FaultFs, kind: str) -> None:
    def mount() -> None:
        fault_fs.mount()
        settle()

    run = PhasedRun(
        lab,
        lab.prompts(700, 1283, family=110),
        [
            Phase("first", served=False),
            Phase("reads hang", _only(fault_fs, "read", "*.kv", "hang"), served=False),
            Phase("they have ended", _well(fault_fs)),
            Phase("well after the reads", served=True),
            Phase("everything hangs", fault_fs.pause, served=False),
            Phase("it goes on", _well(fault_fs)),
            Phase("well after everything", served=True),
            Phase("the mount vanishes", fault_fs.abort, served=False),
            Phase("it is mounted again", mount),
            Phase("well after all", served=True),
            Phase("all is gone", lambda: _remove_all(fault_fs), served=False),
            Phase("all is stored again", served=True),
        ],
    )
    result = run.run(transfer(TIERS[kind](fault_fs.path)))
    _in_time(run, result)
    assert count(result, "load_timeouts", "files") >= 1
    assert count(result, "load_late", "files") > 0, "what was read too late came, and was dropped"
    assert count(result, "load_corrupt", "files") == 0
    _few_lines(run.lines, 16)
    assert result.shutdown_seconds < 10


@pytest.mark.parametrize("kind", ["disk", *LONG_KINDS])
@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_a_file_system_that_fails_and_lies(lab: Lab, fault_fs: FaultFs, kind: str) -> None:
    def no_space() -> None:
        _remove_all(fault_fs)
        fault_fs.add("write", "*", "error", number=errno.ENOSPC)

    run = PhasedRun(
        lab,
        lab.prompts(700, 1283, family=110),
        [
            Phase("first", served=False),
            Phase("no space", no_space, served=False),
            Phase("still none", served=False),
            Phase("space", _well(fault_fs)),
            Phase("stored"),
            Phase("well with space", served=True),
            Phase("EIO", _only(fault_fs, "read open getattr", "*.kv", "error", number=errno.EIO), served=False),
            Phase("no EIO", _well(fault_fs)),
            Phase("well without EIO", served=True),
            Phase("ESTALE", _only(fault_fs, "read open", "*.kv", "error", number=errno.ESTALE), served=False),
            Phase("no ESTALE", _well(fault_fs)),
            Phase("well without ESTALE", served=True),
            Phase("short", _only(fault_fs, "read", "*.kv", "cut"), served=False),
            Phase("stored again after short", _well(fault_fs)),
            Phase("wrong", _only(fault_fs, "read", "*.kv", "flip"), served=False),
            Phase("stored again after wrong", _well(fault_fs)),
            Phase("well after wrong", served=True),
        ],
    )
    result = run.run(transfer(TIERS[kind](fault_fs.path)))
    _in_time(run, result)
    assert count(result, "load_corrupt", "files") > 0
    assert count(result, "load_timeouts", "files") == 0
    _few_lines(run.lines, 24)


@pytest.mark.parametrize("other", ["ram", pytest.param("disk", marks=pytest.mark.long)])
@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_a_healthy_tier_serves_while_another_hangs(lab: Lab, fault_fs: FaultFs, other: str, tmp_path: Path) -> None:
    healthy = {
        "ram": {"name": "healthy", "type": "cpu", "capacity": "256MiB"},
        "disk": {"name": "healthy", "type": "disk", "path": str(tmp_path / "kv")},
    }[other]
    run = PhasedRun(
        lab,
        lab.prompts(700, 1283, family=110),
        [
            Phase("first", served=False),
            Phase("both", served=True),
            Phase("everything of one hangs", fault_fs.pause, served=True),
            Phase("it hangs still", served=True),
            Phase("it goes on", fault_fs.resume, served=True),
        ],
    )
    # The one that hangs is asked to serve whenever it answers. Lookups wait for it, however busy it is.
    files = {**TIERS["disk"](fault_fs.path), "load_weight": 50}
    result = run.run(transfer(healthy, files, lookup_grace_seconds=LOOKUP_SECONDS))
    _in_time(run, result)
    assert count(result, "load_hits", "healthy") > 0
    assert count(result, "load_hits", "files") > 0
    assert count(result, "load_failures", "healthy") == count(result, "load_timeouts", "healthy") == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", "nfs", "disk-bounded"])
@pytest.mark.parametrize("lab", ["gemma3", "qwen3_next"], indirect=True)
def test_engine_starts_on_a_file_system_that_hangs_and_uses_it_later(lab: Lab, fault_fs: FaultFs, kind: str) -> None:
    run = PhasedRun(
        lab,
        lab.prompts(700, 1283, family=110),
        [
            Phase("hangs from the start", fault_fs.pause, served=False),
            Phase("hangs still", served=False),
            Phase("it goes on", _well(fault_fs), served=False),
            Phase("stored"),
            Phase("well", served=True),
        ],
    )
    result = run.run(transfer(TIERS[kind](fault_fs.path), open_timeout_seconds=1))
    _in_time(run, result)
    assert count(result, "load_timeouts", "files") == 0
    _few_lines(run.lines, 8)
