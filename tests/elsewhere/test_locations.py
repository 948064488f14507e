"""The tier that has an object: every tier is asked, and none is waited for beyond its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.elsewhere.locations import locate
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import MemoryBackend, key, memory_tier

Open = Callable[..., tuple[Tier, MemoryBackend]]

SECONDS = 30


@pytest.fixture
def io() -> Iterator[IoLoop]:
    loop = IoLoop.acquire()
    yield loop
    loop.release()


@pytest.fixture
def tier(io: IoLoop) -> Iterator[Open]:
    opened: list[tuple[Tier, MemoryBackend]] = []

    def start(name: str, *numbers: int, grace_seconds: float = 0.02, **common: object) -> tuple[Tier, MemoryBackend]:
        config, made = memory_tier(name, **common)  # type: ignore[arg-type]
        one = Tier(config, Limits(lookup_grace_seconds=grace_seconds), Counters())
        io.submit(one.open()).result(30)
        made[0].objects.update({key(number): b"" for number in numbers})
        opened.append((one, made[0]))
        return opened[-1]

    yield start
    for _, backend in opened:
        backend.gates["contains"].open()
    close_tiers([one for one, _ in opened], io)


def found(io: IoLoop, tiers: list[Tier], *numbers: int) -> list[str | None]:
    keys: list[ObjectKey] = [key(number) for number in numbers]
    return io.submit(locate(tiers, keys)).result(30)


def test_the_highest_weight_wins_and_then_the_first(io: IoLoop, tier: Open) -> None:
    (a, _), (b, _), (c, _) = (
        tier("a", 1, 2, 3, grace_seconds=SECONDS),
        tier("b", 2, 3, grace_seconds=SECONDS, load_weight=5.0),
        tier("c", 1, 4, grace_seconds=SECONDS),
    )
    assert found(io, [a, b, c], 1, 2, 3, 5) == ["a", "b", "b", None]


def test_a_hung_tier_is_a_miss_at_its_deadline(io: IoLoop, tier: Open) -> None:
    hung, backend = tier("hung", 1, lookup_timeout_seconds=0.2)
    backend.gates["contains"].shut()
    assert found(io, [hung], 1) == [None]


def test_after_a_find_the_others_have_their_grace_period_only(io: IoLoop, tier: Open) -> None:
    (a, _), (hung, backend) = tier("a", 1), tier("hung", 1, lookup_timeout_seconds=20)
    backend.gates["contains"].shut()
    started = time.monotonic()
    assert found(io, [hung, a], 1) == ["a"]
    assert time.monotonic() - started < 10


def test_without_a_find_the_others_have_their_deadline(io: IoLoop, tier: Open) -> None:
    (empty, _), (full, backend) = tier("empty"), tier("full", 1, lookup_timeout_seconds=20)
    backend.gates["contains"].shut()
    answer = io.submit(locate([empty, full], [key(1)]))
    backend.gates["contains"].wait_for_a_call()
    backend.gates["contains"].open()
    assert answer.result(30) == ["full"]
