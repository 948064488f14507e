"""The script of faults: the same seed plays the same, every kind comes up and is counted, and it ends when told to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_disk.plugin import offload_register_backends

from offload_core.api import Backend, LoadOutcome, ObjectKey, StoreOutcome
from offload_core.testing import FAULT_KINDS, FaultScript, ScriptSettings, open_backend
from offload_core.testing.faults.script import Phase, kind_of, phases
from tests.support.memory_backend import key

(DISK,) = offload_register_backends()
BYTES = 64
BRIEF = ScriptSettings(deadline_seconds=0.004, hang_seconds=(0.001, 0.003), sick_calls=(20, 40), well_calls=(5, 10))


class Clock:
    """Time that stands still until it is told to pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def _work(backend: Backend[Any], rounds: int) -> list[str]:
    """Store, look up, load and delete a few objects, over and over; returns the result of each call."""
    seen: list[str] = []
    keys = [key(number) for number in range(4)]
    for _ in range(rounds):
        for call in (_store, _look, _load, _delete):
            try:
                seen.append(str(await call(backend, keys)))
            except OSError as error:
                seen.append(f"{type(error).__name__} {error.errno}")
    return seen


async def _store(backend: Backend[Any], keys: list[ObjectKey]) -> Any:
    reservation = await backend.prepare_store(keys, [BYTES] * len(keys))
    try:
        wanted = [one for one, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
        contents = [memoryview(one.chunk_hash.ljust(BYTES, b".")) for one in wanted]
        return reservation.outcomes, await backend.store(wanted, contents)
    finally:
        await reservation.release()


async def _look(backend: Backend[Any], keys: list[ObjectKey]) -> Any:
    return await backend.contains(keys)


async def _load(backend: Backend[Any], keys: list[ObjectKey]) -> Any:
    buffers = [bytearray(BYTES) for _ in keys]
    reservation = await backend.prepare_load(keys)
    try:
        outcomes = await backend.load_into(keys, [memoryview(buffer) for buffer in buffers])
        return reservation.present, outcomes, [bytes(buffer) for buffer in buffers]
    finally:
        await reservation.release()


async def _delete(backend: Backend[Any], keys: list[ObjectKey]) -> Any:
    return await backend.delete(keys[:1])


def _in_a_disk(folder: Path, script: FaultScript, work: Any) -> Any:
    async def run() -> Any:
        async with open_backend(DISK, {"path": folder}, threads=2, wrap=script.wrap) as backend:
            return await work(backend)

    return asyncio.run(run())


@given(seed=st.integers() | st.text(), at_once=st.integers(1, 20))
def test_a_seed_has_its_phases_sick_and_well_in_turn(seed: int | str, at_once: int) -> None:
    settings = ScriptSettings(kinds_at_once=at_once)
    first = list(itertools.islice(phases(seed, settings), 20))
    assert first == list(itertools.islice(phases(seed, settings), 20))
    for number, phase in enumerate(first):
        sick = number % 2 == 0
        assert bool(phase.faults) == sick
        low, high = settings.sick_seconds if sick else settings.well_seconds
        assert low <= phase.seconds <= high
        low, high = settings.sick_calls if sick else settings.well_calls
        assert low <= phase.calls <= high


@given(seed=st.integers(), at_once=st.integers(1, 20))
def test_every_kind_comes_up_before_one_comes_up_again(seed: int, at_once: int) -> None:
    hands = [_kinds(phase) for phase in itertools.islice(phases(seed, ScriptSettings(kinds_at_once=at_once)), 0, 40, 2)]
    assert all(len(hand) == min(at_once, len(FAULT_KINDS)) for hand in hands)
    needed = -(-len(FAULT_KINDS) // min(at_once, len(FAULT_KINDS)))
    assert set().union(*hands[:needed]) == set(FAULT_KINDS)


def _kinds(phase: Phase) -> set[str]:
    return {kind_of(inject.fault, inject.operation) for inject in phase.faults}


def test_two_seeds_differ() -> None:
    assert next(phases(1, ScriptSettings())) != next(phases(2, ScriptSettings()))


@pytest.mark.parametrize("kinds", [[], ["hang", "typo"], ["hang", "hang"]])
def test_kinds_that_are_not_known_are_refused(kinds: list[str]) -> None:
    with pytest.raises(ValueError, match="must be some of delay, hang, late"):
        ScriptSettings(kinds=kinds)


def test_the_same_calls_meet_the_same_faults_and_every_kind_happens(tmp_path: Path) -> None:
    runs = []
    for folder in ("one", "two"):
        script = FaultScript(BRIEF, Clock())
        script.start("a seed")
        runs.append((_in_a_disk(tmp_path / folder, script, lambda b: _work(b, 40)), script.injected()))
        assert script.phases_begun > 6
    assert runs[0] == runs[1]
    assert runs[0][1].keys() == FAULT_KINDS.keys()


@pytest.mark.parametrize(
    ("seconds_per_call", "begun"),
    [(0, [0, 1, 1, 1, 2, 2, 3, 3, 3, 4]), (2, [0, 1, 1, 2, 2, 3, 3, 4, 4, 5])],
    ids=["by its calls", "by its time"],
)
def test_a_phase_ends(tmp_path: Path, seconds_per_call: float, begun: list[int]) -> None:
    clock = Clock()
    settings = ScriptSettings(sick_calls=(3, 3), well_calls=(2, 2), sick_seconds=(4, 4), well_seconds=(4, 4))
    script = FaultScript(settings, clock)

    async def work(backend: Backend[Any]) -> list[int]:
        script.start(1)
        seen = [script.phases_begun]
        for _ in begun[1:]:
            with contextlib.suppress(OSError):
                await backend.delete([key(1)])
            seen.append(script.phases_begun)
            clock.now += seconds_per_call
        return seen

    assert _in_a_disk(tmp_path / "kv", script, work) == begun


def test_nothing_goes_wrong_before_the_start_and_after_the_end(tmp_path: Path) -> None:
    script = FaultScript(BRIEF)

    async def work(backend: Backend[Any]) -> None:
        for number in range(2):
            keys = [key(number)]
            await backend.delete(keys)
            for _ in range(50):
                assert (await _store(backend, keys))[1] == [StoreOutcome.STORED]
                assert (await _load(backend, keys))[1] == [LoadOutcome.HIT]
                await backend.delete(keys)
            before = script.injected()
            assert bool(before) == bool(number)
            script.start(number)
            await _work(backend, 5)
            script.stop()
            assert script.injected() != before

    _in_a_disk(tmp_path / "kv", script, work)


def test_scripts_with_one_journal_start_and_stop_together_and_count_the_faults_of_all(tmp_path: Path) -> None:
    """As the copies of a script in an engine's process and in its I/O process do."""
    first, second = (FaultScript(BRIEF, journal=tmp_path / "journal") for _ in range(2))
    calm = _in_a_disk(tmp_path / "calm", second, lambda backend: _work(backend, 3))
    first.start(7)
    sick = _in_a_disk(tmp_path / "sick", second, lambda backend: _work(backend, 40))
    assert first.injected() == second.injected() != {}
    assert first.phases_begun == second.phases_begun > 0
    late = FaultScript(BRIEF, journal=tmp_path / "journal")
    assert late.injected() == first.injected(), "a process that starts later plays along"
    second.stop()
    before = first.injected()
    assert _in_a_disk(tmp_path / "well", late, lambda backend: _work(backend, 3)) == calm
    assert first.injected() == before
    assert len(set(sick)) > len(set(calm))
