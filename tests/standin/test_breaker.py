"""A tier that fails in the workers is left alone by the scheduler half too, until it works again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.standin.rig import Rig
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import reference

MAX_FAILURES = 2
NEVER_SECONDS = 3600.0


@pytest.fixture
def model() -> StandInModel:
    return MODELS["gemma3"]()


def prompt(model: StandInModel, family: int) -> list[int]:
    return [3 + (i * (family + 1) + family) % 997 for i in range(2 * model.chunk_tokens + 5)]


def engine(rig: Rig, model: StandInModel, pause_seconds: float, ranks: int) -> StandInEngine:
    tier = rig.scripted_disk() | {
        "breaker_failures": MAX_FAILURES,
        "breaker_pause_seconds": pause_seconds,
        "breaker_max_pause_seconds": pause_seconds,
    }
    return rig.engine(model, ranks=ranks, backends=[tier])


def loads_fail(rig: Rig, model: StandInModel, running: StandInEngine) -> None:
    """Let loads fail until the breakers of all ranks are open; the requests are recomputed."""
    rig.script.fail["load_into"] = 1.0
    for family in range(2):
        (request,) = rig.run(running, prompt(model, family))
        assert running.outputs[request] == reference(tuple(prompt(model, family)), 4)


def stored(rig: Rig, model: StandInModel, ranks: int) -> None:
    first = rig.engine(model, ranks=ranks)
    for family in range(4):
        rig.run(first, prompt(model, family))
    rig.end(first)


def external(running: StandInEngine, request: str) -> int:
    return running.served[request].external_tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_scheduler_half_offers_nothing_of_a_tier_that_a_worker_does_not_use(
    rig: Rig, model: StandInModel, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored(rig, model, ranks)
    running = engine(rig, model, NEVER_SECONDS, ranks)
    loads_fail(rig, model, running)
    unused = sorted(message for message in caplog.messages if "is not used for now" in message)
    halves = ["worker"] if ranks == 1 else [f"worker {rank}" for rank in range(ranks)]
    assert [message.partition(" is not")[0] for message in unused] == [f"tier 'disk' ({half})" for half in halves]
    assert running.counters["breaker_opened|disk"] == running.counters["breaker_open|disk"] == ranks
    rig.script.fail.clear()
    asked, refused = rig.script.calls.copy(), running.counters["breaker_refused|disk"]

    (request,) = rig.run(running, prompt(model, 2))
    assert running.outputs[request] == reference(tuple(prompt(model, 2)), 4)
    assert external(running, request) == 0
    assert running.counters["breaker_refused|disk"] > refused
    assert rig.script.calls == asked, "nothing reaches the medium"


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_offered_again_when_it_works_again_on_all_ranks(rig: Rig, model: StandInModel, ranks: int) -> None:
    stored(rig, model, ranks)
    running = engine(rig, model, 0.01, ranks)
    loads_fail(rig, model, running)
    rig.script.fail.clear()
    served: list[str] = []

    def serves(family: int) -> Callable[[], bool]:
        def happened() -> bool:
            if not running.busy:
                served.append(running.add(prompt(model, family), 4))
                assert running.reset_prefix_cache(running=False, connector=False)
            return running.counters["breaker_open|disk"] == 0 and running.counters["load_hits|disk"] > 0

        return happened

    rig.step_until(running, serves(3), max_steps=20_000)
    rig.drain(running)
    for request in served:
        assert running.outputs[request] == reference(tuple(prompt(model, 3)), 4)
    (request,) = rig.run(running, prompt(model, 2))
    assert external(running, request) == 2 * model.chunk_tokens
