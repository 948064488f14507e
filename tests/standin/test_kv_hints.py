"""vLLM's KV hints on the stand-in engine: prefixes survive, go first or move to a faster tier.

Every action has its answer.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.standin.rig import Rig
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import reference

kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="vLLM has hints from 0.32 on")

RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
FAMILIES = ["gemma3", "qwen3_next"]


def hint(kind: str, /, *, version: str = "1.0", **payload: Any) -> Any:
    return kv_hints.KvHintAction(f"the {kind}", kind, version, payload)


def envelope(*actions: Any, protocol: str = "0.1") -> Any:
    return kv_hints.KvHintsEnvelope(protocol, "message", list(actions))


class Hinted:
    """An engine whose prompts come with hints, and are looked up on the tiers each time."""

    def __init__(self, rig: Rig, engine: StandInEngine) -> None:
        self.rig = rig
        self.engine = engine
        self.answers: list[dict[str, Any]] = []

    def run(self, prompt: list[int], *actions: Any, salt: str = "", **changes: Any) -> int:
        """Run a prompt that has left the prefix cache; return the number of its tokens that were loaded."""
        assert self.engine.scheduler.reset_prefix_cache()
        hints = envelope(*actions) if actions else None
        request = self.engine.add(prompt, 4, salt=salt, **({"kv_hints": hints} if hints else {}), **changes)
        self.rig.step_until(self.engine, lambda: request in self.engine.finished)
        self.rig.drain(self.engine)
        assert self.engine.outputs[request] == reference(tuple(prompt), 4)
        answers = self.engine.transfer_params.get(request, {}).get("hybrid_offload_hints", [])
        self.answers = [action for answer in answers for action in answer.get("actions", [answer])]
        return self.engine.served[request].external_tokens

    @property
    def statuses(self) -> list[str]:
        return [answer["status"] for answer in self.answers]

    def fill(self, chunks: int, prompts: int = 4) -> None:
        """Store other prompts, until everything that is not protected has been evicted."""
        for number in range(prompts):
            self.run(tokens(chunks * self.engine.model.chunk_tokens + 5, f"fill {number}"))


def tokens(count: int, name: str) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(3, 1024) for _ in range(count)]


def stored_bytes(rig: Rig) -> int:
    return sum(path.stat().st_size for path in rig.kv.rglob("*.kv"))


@pytest.fixture(params=FAMILIES)
def small(request: pytest.FixtureRequest, rig: Rig) -> Hinted:
    """An engine whose disk has room for two and a half prompts of two chunks."""
    model = MODELS[request.param]()
    probe = rig.engine(model)
    rig.run(probe, tokens(2 * model.chunk_tokens + 5, "probe"))
    nbytes = stored_bytes(rig)
    rig.end(probe)
    disk = {**rig.scripted_disk("small"), "capacity": int(2.5 * nbytes)}
    engine = rig.engine(model, backends=[disk], retained_share_per_tenant=0.5)
    return Hinted(rig, engine)


def two_chunks(hinted: Hinted, name: str) -> list[int]:
    return tokens(2 * hinted.engine.model.chunk_tokens + 5, name)


@pytest.mark.parametrize("action", [hint("kv.retain", seconds=3600), hint("kv.pin")])
def test_a_retained_prefix_survives_where_others_are_evicted(small: Hinted, action: Any) -> None:
    kept, other = two_chunks(small, "kept"), two_chunks(small, "other")
    whole = 2 * small.engine.model.chunk_tokens
    small.run(kept, action)
    assert small.answers == [
        {
            "action_id": f"the {action.action_type}",
            "action_type": action.action_type,
            "status": "accepted",
            "tokens": whole,
        }
    ]
    small.run(other)
    small.fill(2)
    assert small.run(other) == 0
    assert small.run(kept) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_loads_of_other_prefixes_do_not_make_a_retained_one_the_oldest(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    prompts = {one: tokens(4 * model.chunk_tokens + 5, one) for one in ("probe", "kept", "second", "third")}
    settings: dict[str, Any] = {"retained_share_per_tenant": 0.5, "placement": "kept"}
    probe = rig.engine(model, **settings)
    rig.run(probe, prompts["probe"])
    nbytes = stored_bytes(rig)
    rig.end(probe)
    disk = {**rig.scripted_disk("small"), "capacity": int(3.2 * nbytes)}
    hinted = Hinted(rig, rig.engine(model, backends=[disk], **settings))
    whole = 4 * model.chunk_tokens
    hinted.run(prompts["kept"], hint("kv.pin"))
    hinted.run(prompts["second"])
    hinted.run(prompts["third"])
    assert hinted.run(prompts["second"]) == hinted.run(prompts["third"]) == whole
    hinted.fill(1, prompts=1)  # less than what lies between two rounds of touches
    assert hinted.run(prompts["kept"]) == whole


def test_an_unpinned_prefix_is_evicted_like_others(small: Hinted) -> None:
    kept = two_chunks(small, "kept")
    small.run(kept, hint("kv.pin"))
    small.run(kept, hint("kv.unpin"))
    assert small.statuses == ["accepted"]
    small.fill(2)
    assert small.run(kept) == 0
    small.run(kept, hint("kv.unpin"))
    assert small.statuses == ["refused"], "nothing is pinned any more"
    assert "no hint of this tenant protects" in small.answers[0]["reason"]


def test_a_demoted_prefix_goes_first(small: Hinted) -> None:
    older, demoted = two_chunks(small, "older"), two_chunks(small, "demoted")
    whole = 2 * small.engine.model.chunk_tokens
    small.run(older)
    small.run(demoted, hint("kv.demote"))
    assert small.statuses == ["accepted"]
    small.fill(1, prompts=2)
    assert small.run(older) == whole
    assert small.run(demoted) < whole


def test_a_pinned_prefix_cannot_be_demoted(small: Hinted) -> None:
    pinned = two_chunks(small, "pinned")
    small.run(pinned, hint("kv.pin"))
    small.run(pinned, hint("kv.demote"))
    small.fill(1, prompts=3)
    assert small.run(pinned) == 2 * small.engine.model.chunk_tokens


def test_the_head_of_a_prompt_is_pinned_so_that_other_prompts_resume_there(small: Hinted) -> None:
    chunk = small.engine.model.chunk_tokens
    head = tokens(chunk, "head")
    small.run(head + tokens(2 * chunk, "first"), hint("kv.pin", tokens=chunk + 3))
    assert small.answers[0]["tokens"] == chunk
    small.fill(2)
    assert small.run(head + tokens(chunk, "second")) == chunk


def test_the_head_of_a_demoted_prefix_may_stay(small: Hinted) -> None:
    chunk = small.engine.model.chunk_tokens
    small.run(two_chunks(small, "long"), hint("kv.demote", from_tokens=2 * chunk))
    assert small.statuses == ["refused"]
    assert f"no chunk behind its first {2 * chunk} tokens" in small.answers[0]["reason"]


def test_a_tenant_has_its_own_limit(small: Hinted) -> None:
    prompts = [two_chunks(small, f"prompt {number}") for number in range(3)]
    small.run(prompts[0], hint("kv.pin"), salt="a")
    assert small.statuses == ["accepted"]
    small.run(prompts[1], hint("kv.pin"), salt="a")
    assert small.statuses == ["refused"], "half of the disk is a prompt and a quarter"
    assert "raise retained_share_per_tenant" in small.answers[0]["reason"]
    small.run(prompts[1], hint("kv.unpin"), salt="b")
    assert small.statuses == ["refused"], "another tenant's pins are not its own"
    small.run(prompts[0], hint("kv.unpin"), hint("kv.pin"), salt="a")
    assert small.statuses == ["accepted", "accepted"], "actions count in their order"


def test_unknown_and_malformed_actions_are_refused_and_the_others_done(small: Hinted) -> None:
    prompt = two_chunks(small, "prompt")
    small.run(prompt, hint("kv.evict"), hint("kv.pin", version="9"), hint("kv.retain"), hint("kv.pin"))
    assert small.statuses == ["refused", "refused", "refused", "accepted"]
    reasons = [answer.get("reason", "") for answer in small.answers]
    assert "good actions are: kv.retain, kv.pin, kv.unpin, kv.prefetch, kv.demote" in reasons[0]
    assert "must be '1.0'" in reasons[1]
    assert "seconds" in reasons[2]
    assert small.engine.counters["hints_refused|all"] == 3
    assert small.engine.counters["hints_accepted|all"] == 1


def test_an_envelope_in_the_transfer_parameters_is_read_too(small: Hinted) -> None:
    action = {"action_id": "1", "action_type": "kv.pin", "action_version": "1.0", "payload": {}}
    prompt = two_chunks(small, "prompt")
    small.run(prompt, options={"hints": {"protocol_version": "0.1", "message_id": "http", "actions": [action]}})
    assert small.statuses == ["accepted"]
    small.run(prompt, options={"hints": {"protocol_version": "7"}})
    assert small.statuses == ["refused"]


def test_a_request_that_is_not_followed_gets_refusals(small: Hinted) -> None:
    small.run(two_chunks(small, "prompt"), hint("kv.pin"), options={"load": False, "store": False})
    assert small.statuses == ["refused"]
    small.run(tokens(10, "short"), hint("kv.pin"), hint("kv.prefetch"))
    assert ["shorter than one chunk" in answer["reason"] for answer in small.answers] == [True, True]


def test_a_reset_forgets_pins(small: Hinted) -> None:
    prompt = two_chunks(small, "prompt")
    small.run(prompt, hint("kv.pin"))
    assert small.engine.reset_prefix_cache(running=False, connector=True)
    small.run(prompt)
    small.run(prompt, hint("kv.unpin"))
    assert small.statuses == ["refused"]


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in MODELS), ("gemma3", 2), ("qwen3_next", 2)])
def test_a_prefetched_prefix_is_served_from_the_faster_tier(rig: Rig, name: str, ranks: int) -> None:
    model = MODELS[name]()
    prompt = tokens(2 * model.chunk_tokens + 5, "prompt")
    before = rig.engine(model, ranks=ranks)
    rig.run(before, prompt)
    rig.end(before)

    engine = rig.engine(model, ranks=ranks, backends=[RAM, rig.scripted_disk()], staging_bytes="32MiB")
    hinted = Hinted(rig, engine)
    assert hinted.run(prompt, hint("kv.prefetch"), options={"load": False, "store": False}) == 0
    assert hinted.statuses == ["refused"], "it is not followed"
    assert hinted.run(prompt, hint("kv.prefetch"), options={"max_load_tokens": 0, "store": False}) == 0
    assert hinted.statuses == ["accepted"]
    assert engine.counters["promotions|ram"] > 0
    loaded = engine.counters["load_hits|disk"]

    served = hinted.run(prompt)
    assert served == 2 * model.chunk_tokens
    assert engine.counters["hit_tokens|ram"] == served
    assert engine.counters["load_hits|disk"] == loaded
    assert hinted.run(prompt, hint("kv.prefetch")) == served
    assert engine.counters["load_hits|disk"] == loaded, "all of it is there already"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tail_of_a_prompt_is_prefetched_too(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    end = 2 * model.chunk_tokens + 32
    prompt = tokens(end + 5, "prompt")
    before = rig.engine(model, prefix_match_unit=32)
    rig.run(before, prompt)
    rig.end(before)

    engine = rig.engine(model, backends=[RAM, rig.scripted_disk()], staging_bytes="32MiB", prefix_match_unit=32)
    hinted = Hinted(rig, engine)
    assert hinted.run(prompt, hint("kv.prefetch"), options={"max_load_tokens": 0, "store": False}) == 0
    assert hinted.statuses == ["accepted"]
    loaded = engine.counters["load_hits|disk"]
    assert hinted.run(prompt) == end
    assert engine.counters["hit_tokens|ram"] == end
    assert engine.counters["load_hits|disk"] == loaded


def test_a_prefetch_needs_a_tier_that_takes_objects(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = tokens(2 * model.chunk_tokens + 5, "prompt")
    for backends in ([RAM], [{**RAM, "promote": False}, rig.scripted_disk()]):
        hinted = Hinted(rig, rig.engine(model, backends=backends))
        hinted.run(prompt, hint("kv.prefetch"))
        assert hinted.statuses == ["refused"]
        assert "promote" in hinted.answers[0]["reason"]
        rig.end(hinted.engine)


def test_a_prefetch_fills_at_most_half_of_the_faster_tier(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = tokens(2 * model.chunk_tokens + 5, "prompt")
    before = rig.engine(model)
    rig.run(before, prompt)
    rig.end(before)
    engine = rig.engine(model, backends=[{**RAM, "capacity": stored_bytes(rig) // 2}, rig.scripted_disk()])
    hinted = Hinted(rig, engine)
    hinted.run(prompt, hint("kv.prefetch"))
    assert "more than 50% of the capacity of tier 'ram'; give a smaller value for tokens" in hinted.answers[0]["reason"]


def test_two_connectors_of_ours_give_one_answer(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    disk = {**rig.scripted_disk("bounded"), "capacity": "256MiB"}
    connectors = [
        {
            "kv_connector": "HybridOffloadConnector",
            "kv_connector_module_path": "offload_core.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"io_process": "off", "load_when": "always", "backends": [backend]},
        }
        for backend in (rig.scripted_disk(), disk)
    ]
    hinted = Hinted(rig, rig.engine_of_several(model, connectors))
    hinted.run(tokens(2 * model.chunk_tokens + 5, "prompt"), hint("kv.evict"), hint("kv.pin"))
    assert hinted.statuses == ["refused", "accepted"], "the first connector's tier has no order of eviction"


def test_a_damaged_object_ends_a_prefetch_and_is_recomputed(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = tokens(2 * model.chunk_tokens + 5, "prompt")
    before = rig.engine(model)
    rig.run(before, prompt)
    rig.end(before)
    for path in rig.kv.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    hinted = Hinted(rig, rig.engine(model, backends=[RAM, rig.scripted_disk()]))
    hinted.run(prompt, hint("kv.prefetch"), options={"max_load_tokens": 0, "store": False})
    assert hinted.statuses == ["accepted"]
    assert hinted.engine.counters["load_corrupt|disk"] > 0
    assert hinted.engine.counters["promotions|ram"] == 0
    assert hinted.run(prompt) == 0
    assert hinted.run(prompt) == 2 * model.chunk_tokens
