"""Sessions with streaming input beside loads: no request that lacks a session's blocks stops its next turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.standin.rig import Rig
from tests.support.standin.content import Prefix
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import reference

OTHER = list(range(3, 603))
"""The prompt of a request that is no session. Beside two turns of a session its load has room, but it could not run."""
TURNS = [list(range(700, 1210)), list(range(100, 480)), list(range(30))]
NOTHING: dict[str, Any] = {"load": False, "store": False}


@pytest.fixture
def engine(rig: Rig) -> StandInEngine:
    """An engine of 23 blocks, whose tier has the prefix of ``OTHER``."""
    engine = rig.engine(replace(MODELS["mla"](), num_blocks=24, max_model_len=1400))
    rig.run(engine, OTHER)
    assert engine.scheduler.reset_prefix_cache()
    return engine


def turn(rig: Rig, engine: StandInEngine, session: str, tokens: list[int]) -> None:
    """Give a session that waits for input its next turn, and run that to its end."""
    engine.scheduler.add_request(
        Request(
            request_id=session,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=engine._block_hasher,
            resumable=True,
        )
    )
    content = engine.scheduler.requests[session]._all_token_ids
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    engine.prefixes[session] = Prefix(content, engine._seed(session), vocabulary, 3)
    turns = len(engine.outputs[session])
    end_turn(rig, engine, session)
    assert len(engine.outputs[session]) == turns + 1


def end_turn(rig: Rig, engine: StandInEngine, session: str) -> None:
    rig.step_until(engine, lambda: engine.states()[session] == "WAITING_FOR_STREAMING_REQ")


def check_end(rig: Rig, engine: StandInEngine, session: str, other: str) -> None:
    """Check that the other request ends and that the session goes on. After its end, a request loads."""
    rig.step_until(engine, lambda: other in engine.finished)
    assert engine.outputs[other] == reference(tuple(OTHER), 2)
    turn(rig, engine, session, TURNS[-1])
    engine.abort(session)
    rig.drain(engine)
    assert rig.run_again(engine, OTHER) > 0


@pytest.mark.parametrize("options", [None, NOTHING])
def test_no_other_request_loads_while_a_session_is_open(
    rig: Rig, engine: StandInEngine, options: dict[str, Any] | None
) -> None:
    session = engine.add(TURNS[0], 1, options=options, resumable=True)
    end_turn(rig, engine, session)
    rig.script.hold_steps["load_into"] = 30
    other = engine.add(OTHER, 2)
    rig.step_until(engine, lambda: engine.states().get(other) != "WAITING")
    turn(rig, engine, session, TURNS[1])
    check_end(rig, engine, session, other)
    assert engine.served[other].external_tokens == 0


@pytest.mark.parametrize("options", [None, NOTHING])
def test_a_session_begins_after_the_loads_that_go_on(
    rig: Rig, engine: StandInEngine, options: dict[str, Any] | None
) -> None:
    rig.script.hold_steps["load_into"] = 30
    other = engine.add(OTHER, 2)
    rig.step_until(engine, lambda: engine.states()[other] == "WAITING_FOR_REMOTE_KVS")
    session = engine.add(TURNS[0], 1, options=options, resumable=True)
    end_turn(rig, engine, session)
    turn(rig, engine, session, TURNS[1])
    check_end(rig, engine, session, other)
    assert engine.served[other].external_tokens > 0


def test_loads_within_the_step_go_on_beside_a_session(rig: Rig) -> None:
    engine = rig.engine(MODELS["mla"](), backends=[{"name": "ram", "type": "cpu", "capacity": "64MiB"}])
    rig.run(engine, OTHER)
    assert rig.run_again(engine, OTHER) > 0
    assert engine.scheduler.reset_prefix_cache()
    session = engine.add(TURNS[0], 1, resumable=True)
    end_turn(rig, engine, session)
    other = engine.add(OTHER, 2)
    rig.step_until(engine, lambda: other in engine.finished)
    assert engine.served[other].external_tokens > 0
    assert engine.counters["loads_within_step|ram"] == 1
    engine.abort(session)
    rig.drain(engine)


def test_a_session_that_is_open_alone_loads(rig: Rig, engine: StandInEngine) -> None:
    session = engine.add(OTHER, 1, resumable=True)
    end_turn(rig, engine, session)
    assert engine.served[session].external_tokens > 0
    turn(rig, engine, session, TURNS[1])
    engine.abort(session)
    rig.drain(engine)
