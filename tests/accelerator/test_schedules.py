"""Random schedules with held streams: right bytes, no leak, no deadlock; and each wait is necessary for them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

import pytest

from offload_core.memory.device import stream_waits
from offload_core.memory.device.stream_waits import StreamWaits
from offload_core.runtime.io_loop import IoLoop
from tests.accelerator.schedules import run
from tests.support.accelerator import StreamControl, only_simulated
from tests.support.paths import ROOT

WAITS = sorted(name for name, _ in inspect.getmembers(StreamWaits, inspect.isfunction) if not name.startswith("_"))
UNSEEN_ON_A_GPU = {"descriptors_follow_copy", "shutdown_follows_copies"}
"""CUDA's driver copies the descriptors in the call, and memory that it unpins outlives the copies."""
QUICK, MANY = 60, 4000
SEEDS_FOR_A_FAULT = 200


@pytest.fixture
def io() -> Iterator[IoLoop]:
    loop = IoLoop.acquire()
    yield loop
    loop.release()


def run_all(io: IoLoop, control: StreamControl, seeds: range) -> Counter[str]:
    ended: Counter[str] = Counter()
    for seed in seeds:
        try:
            ended += run(io, control, seed)
        except BaseException as error:
            error.add_note(f"the schedule of seed {seed}")
            raise
    return ended


def test_no_schedule_finds_a_fault(io: IoLoop, control: StreamControl) -> None:
    ended = run_all(io, control, range(QUICK))
    assert all(ended[status] for status in ("loaded", "cancelled", "timed out")), ended


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_schedule_of_thousands_finds_a_fault(io: IoLoop, control: StreamControl) -> None:
    run_all(io, control, range(QUICK, QUICK + MANY))


@pytest.mark.parametrize(
    "wait", [pytest.param(wait, marks=only_simulated) if wait in UNSEEN_ON_A_GPU else wait for wait in WAITS]
)
def test_schedules_find_the_fault_if_one_wait_is_missing(
    io: IoLoop, control: StreamControl, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    monkeypatch.setattr(StreamWaits, wait, lambda *_: True)
    for seed in range(SEEDS_FOR_A_FAULT):
        try:
            run(io, control, seed)
        except Exception as fault:  # of any kind
            print(f"{wait}: seed {seed}: {type(fault).__name__} {fault}")
            return
    pytest.fail(f"{SEEDS_FOR_A_FAULT} schedules work without {wait}")


def test_all_waits_are_in_one_place() -> None:
    waiting = (".wait_event(", ".wait_stream(", ".synchronize(", ".query(")
    one_place = inspect.getsource(stream_waits)
    assert sum(one_place.count(call) for call in waiting) >= len(WAITS)
    for path in (ROOT / "offload_core").rglob("*.py"):
        if path.name not in ("stream_waits.py", "batched_copy.py"):  # a trial at the start waits for itself
            assert not any(call in path.read_text() for call in waiting), f"{path} waits for a device itself"
