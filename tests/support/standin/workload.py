"""Random work for the stand-in: shared prefixes, samples, aborts, resets, small caches; reproducible by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.standin.content import Prefix
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import StandInModel

_FIRST_TOKEN = 3
_VOCABULARY = 1024
_ASLEEP_STEPS = 4
"""Steps of the I/O during a sleep."""


@dataclass(frozen=True)
class Arrival:
    """A request and the step in which it arrives."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str = ""


@dataclass(frozen=True)
class Workload:
    """The events of every step.

    Args:
        seed: the seed of all choices.
        arrivals: the requests, in the order of their steps.
        aborts: steps in which some unfinished request is aborted.
        resets: by step, whether to preempt running requests and whether to reset the connector too.
        sleeps: by step, the level of a sleep and whether the KV cache has other tensors after it. A sleep that vLLM
            refuses, since a request waits for a load, is tried again in the next step.
    """

    seed: int
    arrivals: tuple[Arrival, ...]
    aborts: frozenset[int] = frozenset()
    resets: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    sleeps: dict[int, tuple[int, bool]] = field(default_factory=dict)


def make_workload(
    model: StandInModel, seed: int, *, requests: int = 14, aborts: int = 0, resets: int = 0, salts: int = 1
) -> Workload:
    """Return random work: prompts of any length in a few families; some prompts arrive several times at once."""
    rng = random.Random(f"{model.name}/{seed}")
    families = [_tokens(rng, model.max_model_len) for _ in range(3)]
    step = 0
    arrivals: list[Arrival] = []
    while len(arrivals) < requests:
        step += rng.choice((0, 0, 1, 3, 9))
        max_tokens = rng.choice((1, 2, 8, 40))
        longest = model.max_model_len - max_tokens
        shared = rng.choice((0, rng.randrange(longest), rng.randrange(longest), model.chunk_tokens * rng.randint(1, 3)))
        length = min(longest, max(1, shared + rng.choice((0, 1, 7, rng.randrange(model.chunk_tokens)))))
        shared = min(shared, length)
        prompt = tuple(rng.choice(families)[:shared] + _tokens(rng, length - shared))
        salt = f"salt{rng.randrange(salts)}" if salts > 1 else ""
        arrivals += [Arrival(step, prompt, max_tokens, salt)] * rng.choice((1, 1, 1, 3))
    last = step + 60
    return Workload(
        seed,
        tuple(arrivals),
        frozenset(rng.randrange(1, last) for _ in range(aborts)),
        {rng.randrange(1, last): (rng.random() < 0.5, rng.random() < 0.5) for _ in range(resets)},
    )


def repeated_work(model: StandInModel, seed: int) -> Workload:
    """A few prompts again and again, under aborts and resets; most of these preempt and leave the tiers alone."""
    rng = random.Random(f"again/{seed}")
    lengths = [model.chunk_tokens * chunks + rng.randint(1, 9) for chunks in (1, 2, 2)]
    prompts = [tuple(rng.randrange(3, 1024) for _ in range(length)) for length in lengths]
    arrivals = [Arrival(rng.randrange(150), rng.choice(prompts), rng.choice((1, 4, 12))) for _ in range(30)]
    resets = {rng.randrange(150): (rng.random() < 0.7, rng.random() < 0.1) for _ in range(30)}
    aborts = frozenset(rng.randrange(150) for _ in range(12))
    return Workload(seed, tuple(sorted(arrivals, key=lambda arrival: arrival.step)), aborts, resets)


def reference(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return the tokens that any right engine gives for the prompt."""
    prefix = Prefix(prompt, "", _VOCABULARY, _FIRST_TOKEN)
    return [prefix.sample(len(prompt) + index) for index in range(max_tokens)]


def drive(
    engine: StandInEngine, work: Workload, between_steps: Callable[[], None], max_steps: int = 4000
) -> dict[str, Arrival]:
    """Run the work to its end; returns the requests by id.

    Args:
        engine: the engine.
        work: the requests, aborts, resets and sleeps.
        between_steps: a function that lets the I/O go on.
        max_steps: the number of steps after which the work counts as stuck.

    Raises:
        WrongBytesError: the engine would have read wrong bytes.
        AssertionError: the tokens are wrong, or the work does not end.
    """
    rng = random.Random(f"drive/{work.seed}")
    waiting = list(work.arrivals)
    asked: dict[str, Arrival] = {}
    sleeps = sorted(work.sleeps.items())
    step = 0
    while waiting or engine.busy:
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            asked[engine.add(arrival.prompt, arrival.max_tokens, salt=arrival.salt)] = arrival
        if step in work.aborts and (unfinished := engine.unfinished()):
            engine.abort(rng.choice(unfinished))
        if step in work.resets:
            running, connector = work.resets[step]
            engine.reset_prefix_cache(running=running, connector=connector)
        if sleeps and sleeps[0][0] <= step and engine.sleep(sleeps[0][1][0]):
            for _ in range(_ASLEEP_STEPS):
                between_steps()
            engine.wake_up(moved=sleeps.pop(0)[1][1])
        engine.step()
        between_steps()
        step += 1
        assert step < max_steps, f"no end in sight: {engine.unfinished()} in states {engine.states()}"
    check_outputs(engine, asked)
    return asked


def check_outputs(engine: StandInEngine, asked: dict[str, Arrival]) -> None:
    """Check that every request gave its tokens of a run without offloading; an aborted one only the first of them."""
    for request_id, arrival in asked.items():
        expected = reference(arrival.prompt, arrival.max_tokens)
        got = engine.outputs[request_id]
        if engine.finished[request_id] == "abort":
            expected = expected[: len(got)]
        assert got == expected, f"request {request_id} gave {got}, expected {expected}"


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(count)]
