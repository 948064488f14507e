"""Envelopes of hints: each action is accepted as it is meant, or refused with the good values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.lookup.hints.envelope import (
    GOOD_ACTIONS,
    MAX_ACTIONS,
    DemotePayload,
    PrefixPayload,
    RetainPayload,
    read_envelope,
)
from tests.support.documents import blocks
from tests.support.paths import ROOT


def action(kind: str = "kv.pin", payload: Any = None, **changes: Any) -> dict[str, Any]:
    fields = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload or {}}
    return fields | changes


def envelope(*actions: Any, **changes: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)} | changes


@pytest.mark.parametrize(
    ("kind", "payload", "read"),
    [
        ("kv.retain", {"seconds": 60}, RetainPayload(seconds=60)),
        ("retain", {"seconds": 0.5, "tokens": 7}, RetainPayload(seconds=0.5, tokens=7)),
        ("kv.pin", {}, PrefixPayload()),
        ("kv.unpin", {"tokens": 512}, PrefixPayload(tokens=512)),
        ("prefetch", {}, PrefixPayload()),
        ("kv.demote", {"from_tokens": 0}, DemotePayload()),
    ],
)
def test_good_actions(kind: str, payload: dict[str, Any], read: Any) -> None:
    (one,) = read_envelope(envelope(action(kind, payload))).actions
    assert (one.payload, one.status) == (read, None)
    one.accept(512)
    assert one.answer() == {
        "action_id": "a",
        "action_type": "kv." + kind.removeprefix("kv."),
        "status": "accepted",
        "tokens": 512,
    }


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (action("kv.evict"), f"the action 'kv.evict' is unknown; good actions are: {GOOD_ACTIONS}"),
        (action(action_version="2.0"), "version '2.0' of kv.pin is not supported; it must be '1.0'"),
        (action("kv.retain"), "its keys are: tokens, seconds"),
        (action("kv.retain", {"seconds": 0}), "seconds: 0: Input should be greater than 0"),
        (action("kv.retain", {"seconds": float("inf")}), "seconds: inf"),
        (action("kv.retain", {"seconds": "60"}), "seconds: '60'"),
        (action("kv.retain", {"seconds": True}), "seconds: True"),
        (action("kv.pin", {"tokens": 0}), "tokens: 0"),
        (action("kv.pin", {"seconds": 5}), "seconds: 5: Extra inputs are not permitted"),
        (action("kv.demote", {"from_tokens": -1}), "its keys are: from_tokens"),
    ],
)
def test_a_bad_action_is_refused_and_the_others_are_not(bad: dict[str, Any], said: str) -> None:
    refused, good = read_envelope(envelope(bad, action())).actions
    assert refused.answer()["status"] == "refused"
    assert said in refused.answer()["reason"]
    assert refused.payload is None
    assert good.payload == PrefixPayload()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "the envelope is not valid"),
        (envelope(protocol_version="1.0"), "the protocol version '1.0' is not supported; it must be '0.1'"),
        (envelope(action(payload=[1])), "actions.0.payload: [1]"),
        (envelope(action(action_id=3)), "actions.0.action_id: 3"),
        (envelope(*[action()] * (MAX_ACTIONS + 1)), f"a list of up to {MAX_ACTIONS}"),
        (envelope(message_id="m" * 300), "message_id"),
        (envelope(extra=1), "extra: 1"),
    ],
)
def test_a_bad_envelope_is_refused_as_a_whole(value: Any, said: str) -> None:
    answer = read_envelope(value).answer()
    assert answer["status"] == "refused"
    assert said in answer["reason"]
    assert len(answer["message_id"]) <= 200


def test_the_hints_and_the_answer_of_the_document_are_real() -> None:
    sent, received = map(json.loads, blocks((ROOT / "docs" / "hints.md").read_text(), "json"))
    hints = sent["kv_transfer_params"]["hybrid_offload"]["hints"]
    hints["actions"].append(action("kv.evict", action_id="2"))
    read = read_envelope(hints)
    assert read.actions[0].payload == RetainPayload(seconds=600)
    read.actions[0].accept(8192)
    (shown,) = received["hybrid_offload_hints"]
    reason = shown["actions"][1].pop("reason")
    answer = read.answer()
    assert answer["actions"][1].pop("reason").startswith(reason.removesuffix("..."))
    assert answer == shown


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_kinds = st.sampled_from(GOOD_ACTIONS.split(", ")) | st.text(max_size=8)
_payloads = st.dictionaries(st.sampled_from(["tokens", "seconds", "from_tokens", "more"]), _json, max_size=3)
_actions = st.builds(lambda kind, payload: action(kind, payload), _kinds, _payloads)


@given(_json | st.builds(envelope, _actions, _actions) | st.builds(envelope, _json))
def test_whatever_a_client_sends_there_is_one_small_answer(value: Any) -> None:
    read = read_envelope(value)
    answer = json.dumps(read.answer())
    assert len(answer) < 3000
    assert bool(read.reason) != isinstance(read.answer().get("actions"), list)
    for one in read.actions:
        assert (one.payload is None) == (one.status == "refused")
