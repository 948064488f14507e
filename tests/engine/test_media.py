"""The engine on every medium, alone and stacked: what it says never depends on where its KV cache comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from offload_core.objects.format import HEADER_BYTES
from tests.engine.media import ALL, LASTING, SMALL_BYTES, Storage
from tests.engine.workloads import SEEDS, check_outputs, run_workloads
from tests.support.engine.lab import STANDARD_LENGTHS, TO_THE_LAST_STORE, UNTIL_STORED, Lab, count, installed, served
from tests.support.engine.spec import Round, RunFailedError, RunResult, compare, logged_problems
from tests.support.workload import random_workload

Stores = Callable[[str], Storage]

# A damaged object, and a process that was killed, are told of; nothing else is.
DAMAGE = r"damaged object, deleting it"


def _names(names: Sequence[str], *, quick: Sequence[str] = ()) -> list[Any]:
    """One parameter per medium; all but a few are for `make test-long`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


def _total(result: RunResult, counter: str, storage: Storage) -> int:
    return sum(count(result, counter, name) for name in storage.names)


def _stored_bytes(storage: Storage) -> int:
    return sum(len(found.read() or b"") for found in storage.objects())


def _check(
    lab: Lab, rounds: list[Round], storage: Storage, *, env: dict[str, str] | None = None, **overrides: Any
) -> RunResult:
    """Run the rounds; fail where an output is not that of an engine without offloading, or something was logged."""
    lines: list[str] = []
    result = lab.run(rounds, storage.transfer(**TO_THE_LAST_STORE), env, on_line=lines.append, **overrides)
    assert compare(lab.alone(rounds), result) == []
    assert logged_problems(lines) == []
    assert _total(result, "load_failures", storage) == _total(result, "store_failures", storage) == 0
    assert _total(result, "load_timeouts", storage) == _total(result, "lookup_failures", storage) == 0
    return result


@pytest.mark.parametrize("medium", _names(LASTING, quick=("nfs-file",)))
def test_a_second_process_is_served_what_the_first_has_stored(medium: str, gemma3: Lab, storage: Stores) -> None:
    _second_process(gemma3, storage(medium))


@pytest.mark.long
@pytest.mark.parametrize("medium", LASTING)
def test_a_second_process_of_a_model_with_states_too(medium: str, qwen3_next: Lab, storage: Stores) -> None:
    _second_process(qwen3_next, storage(medium))


def _second_process(lab: Lab, storage: Storage) -> None:
    # What was used last is asked for first: it is still there where the others had to go.
    first = _check(lab, lab.standard(*reversed(STANDARD_LENGTHS)), storage)
    second = _check(lab, lab.standard(), storage)
    assert not any(served(first).values())
    assert _total(second, "load_missing", storage) == _total(second, "load_corrupt", storage) == 0
    if storage.medium.evicts:
        assert served(second)["family30-700"] > 0
        assert _stored_bytes(storage) <= SMALL_BYTES
    else:
        assert all(served(second).values())
        assert _total(second, "stores", storage) == 0 or len(storage.tiers) > 1


def test_a_stack_is_served_from_what_is_left_of_it(gemma3: Lab, storage: Stores) -> None:
    stack = storage("stack")
    rounds = gemma3.standard()
    again = rounds[0].model_copy(update={"name": "again", "reset_prefix_cache_before": True})
    first = _check(gemma3, rounds, stack, extra_engine_args=UNTIL_STORED)
    assert {name: count(first, "stores", name) for name in stack.names} == dict.fromkeys(
        stack.names, count(first, "stores", "ram")
    )
    for found in stack.objects():
        if found.tier == "disk":
            found.delete()
    second = _check(gemma3, [*rounds, again], stack)
    assert all(served(second, 0).values())
    assert all(served(second, 1).values())
    assert count(second, "load_hits", "shared") > 0, "first from what other hosts see too"
    assert count(second, "promotions", "ram") > 0
    assert count(second, "load_hits", "ram") > 0, "then from the fastest, which has kept it"
    assert count(second, "load_hits", "disk") == 0


@pytest.mark.parametrize("medium", _names(ALL, quick=("disk-evicting",)))
def test_random_work_under_preemption(medium: str, gemma3: Lab, storage: Stores) -> None:
    _random_work(gemma3, storage(medium))


@pytest.mark.long
@pytest.mark.parametrize("medium", ALL)
def test_random_work_with_states_under_preemption(medium: str, qwen3_next: Lab, storage: Stores) -> None:
    _random_work(qwen3_next, storage(medium))


def _random_work(lab: Lab, chosen: Storage) -> None:
    workloads = [random_workload(seed) for seed in SEEDS]
    lines: list[str] = []
    transfer = chosen.transfer(hybrid_chunk_size=lab.block_size)
    result = run_workloads(lab, workloads, transfer, on_line=lines.append)
    assert sum(item.preemptions for item in result.workloads) > 0
    assert any(request.external_cached_tokens for item in result.workloads for request in item.requests)
    if chosen.medium.evicts:
        assert _total(result, "store_bytes", chosen) > SMALL_BYTES
        assert _stored_bytes(chosen) <= SMALL_BYTES
    assert logged_problems(lines) == []
    check_outputs(lab, workloads, result)


@pytest.mark.long
@pytest.mark.parametrize("medium", [name for name in LASTING if "evicting" not in name])
def test_damaged_objects_are_recomputed_and_stored_again(medium: str, lab: Lab, storage: Stores) -> None:
    damaged = storage(medium)
    rounds = lab.standard()
    lab.run(rounds, damaged.transfer())
    for index, found in enumerate(damaged.objects()):
        content = bytearray(found.read() or b"")
        offset = 100 if index % 2 else HEADER_BYTES + (len(content) - HEADER_BYTES) // 2
        content[offset] ^= 0x40
        found.write(bytes(content))

    lines: list[str] = []
    result = lab.run(rounds, damaged.transfer(), on_line=lines.append)
    assert compare(lab.alone(rounds), result) == []
    assert not any(served(result).values()), "nothing that is left can be whole"
    assert _total(result, "load_corrupt", damaged) > 0
    assert _total(result, "load_hits", damaged) == _total(result, "load_failures", damaged) == 0
    assert [line for line in logged_problems(lines) if DAMAGE not in line] == []

    healed = lab.run(rounds, damaged.transfer())
    assert compare(lab.alone(rounds), healed) == []
    assert all(served(healed).values())


@pytest.mark.long
@pytest.mark.parametrize("medium", LASTING)
def test_a_process_that_was_killed_while_it_stored(medium: str, gemma3: Lab, storage: Stores, tmp_path: Path) -> None:
    chosen = storage(medium)
    rounds = gemma3.standard()
    with pytest.raises(RunFailedError, match=r"exit code -9"):
        gemma3.run(rounds, chosen.transfer(), installed(tmp_path, "killed_in_store"))
    stored = len(list(chosen.objects()))
    assert stored > 0

    verified = CliRunner().invoke(app, ["verify", str(chosen.config_file()), "--json"])
    assert verified.exit_code == 0, verified.output

    second = _check(gemma3, rounds, chosen)
    if not chosen.medium.evicts:
        assert served(second)["family30-700"] == 700 // 256 * 256
    _check(gemma3, gemma3.standard(1283, 700), chosen)
    assert served(_check(gemma3, gemma3.standard(700, 1283), chosen))["family30-700"] > 0
    left = list((chosen.place.folder / "disk").rglob("*.tmp"))
    assert left == [], "the next process that opens a disk removes what a killed one had begun"
