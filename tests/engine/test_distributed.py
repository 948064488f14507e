"""The engine on distributed stores: two engines share one, and its parts die, hang and come back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.distributed import STORES, TIER, TOKEN, LMCache, Mooncake, NixlBucket, Store
from tests.engine.labs import QUICK_LABS
from tests.engine.phases import Phase, PhasedRun
from tests.engine.signals_in_calls import ORDER_VARIABLE, CallName, write_order
from tests.engine.test_faulty_mount import LOAD_SECONDS, LOOKUP_SECONDS, SLACK_SECONDS, settle, transfer
from tests.support import second_host
from tests.support.engine.lab import TO_THE_LAST_STORE, Lab, count, installed, ours, served
from tests.support.engine.spec import Round, RunResult, compare, logged_problems, logged_tracebacks
from tests.support.polling import wait_until
from tests.support.second_host import HERE, SecondHost

BOTH = ["gemma3", "qwen3_next"]
PARTS = [
    ("lmcache", "server"),
    ("mooncake", "master"),
    ("mooncake", "owner"),
    ("nixl-folder", "child"),
    ("nixl-bucket", "server"),
    ("nixl-bucket", "child"),
]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make, why_not = STORES[request.param]
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "store"
    folder.mkdir()
    store = make(folder)
    yield store
    store.stop()


@pytest.fixture(scope="session")
def served_from_disk(lab: Lab, stored: Path) -> dict[str, int]:
    return served(lab.run(lab.standard(), ours(stored)))


def tier_of(store: Store, **keys: Any) -> dict[str, Any]:
    return {"name": TIER, **store.tier(), **keys}


def run_on(store: Store, lab: Lab, rounds: list[Round], env: dict[str, str] | None = None) -> RunResult:
    """Run an engine on the store; fail where an output is not that without offloading, or something went wrong."""
    lines: list[str] = []
    settings = ours(Path("unused"), backends=[tier_of(store)], **TO_THE_LAST_STORE)
    result = lab.run(rounds, settings, env, on_line=lines.append)
    assert compare(lab.reference(rounds), result) == []
    assert logged_problems(lines) == []
    for counter in ("load_failures", "load_timeouts", "load_corrupt", "lookup_failures", "store_failures"):
        assert count(result, counter, TIER) == 0, counter
    return result


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_a_second_engine_is_served_as_from_disk(lab: Lab, store: Store, served_from_disk: dict[str, int]) -> None:
    assert not any(served(run_on(store, lab, lab.standard())).values())
    second = run_on(store, lab, lab.standard())
    assert served(second) == served_from_disk
    assert count(second, "load_missing", TIER) == 0


@pytest.mark.long
@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("lab", BOTH, indirect=True)
def test_two_engines_at_once(lab: Lab, store: Store) -> None:
    prompts = [prompt for family in range(80, 84) for prompt in lab.prompts(700, 1283, 2500, family=family)]
    names = ("first", "second", "third")
    rounds = [Round(name=name, prompts=prompts, reset_prefix_cache_before=True) for name in names]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run_on(store, lab, rounds), range(2)))
    for result in both:
        assert sum(served(result, 2).values()) > 0


@pytest.fixture
def other_host() -> Iterator[SecondHost]:
    if reason := second_host.why_not():
        pytest.skip(reason)
    host = SecondHost()
    yield host
    host.stop()


@pytest.mark.long
@pytest.mark.parametrize("kind", [LMCache, Mooncake, NixlBucket])
@pytest.mark.parametrize("lab", BOTH, indirect=True)
def test_engines_on_two_hosts_share_what_they_store(
    lab: Lab,
    kind: type[LMCache | Mooncake | NixlBucket],
    tmp_path: Path,
    served_from_disk: dict[str, int],
    other_host: SecondHost,
) -> None:
    (why_not,) = (reason for make, reason in STORES.values() if make is kind)
    if reason := why_not():
        pytest.skip(reason)
    store = kind(tmp_path, HERE)
    try:
        there = {**TOKEN, **other_host.environment}
        assert not any(served(run_on(store, lab, lab.standard(), there)).values())
        assert served(run_on(store, lab, lab.standard(), TOKEN)) == served_from_disk
        prompts = [prompt for family in (80, 81) for prompt in lab.prompts(700, 1283, 2500, family=family)]
        rounds = [Round(name=name, prompts=prompts, reset_prefix_cache_before=True) for name in ("first", "second")]
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda env: run_on(store, lab, rounds, env), (TOKEN, there)))
        for result in both:
            assert sum(served(result, 1).values()) > 0
        assert served(run_on(store, lab, rounds, there), 0)[prompts[-1].name] > 0
    finally:
        store.stop()


@dataclass
class Hurt:
    """Hurts one part of a store in the middle of a call of the engine's tier.

    Args:
        order: the file that the plugin in the engine reads.
        lines: what the engine has logged.
    """

    store: Store
    part: str
    order: Path
    lines: list[str]

    def settle(self) -> None:
        """Wait until the tier has noticed that its storage is well, also on a busy machine."""
        settle()
        wait_until(self._is_used, "a breaker is open")

    def _is_used(self) -> bool:
        said = [sum(words in line for line in list(self.lines)) for words in ("is not used for now", "is used again")]
        return said[0] == said[1]

    def during(self, call: CallName, number: signal.Signals) -> Callable[[], None]:
        """Return an action that orders a signal to the part in the next such call."""
        return lambda: write_order(self.order, call, self.store.pids(self.part), number)

    def check(self) -> None:
        """Fail unless the last order was carried out."""
        assert not self.order.exists(), "the call never came, so nothing was hurt"

    def start_again(self) -> None:
        """Replace a part that was killed."""
        self.check()
        self.store.restart(self.part)
        self.settle()

    def resume(self) -> None:
        """Let a suspended part go on."""
        self.check()
        self.store.resume(self.part)
        self.settle()

    def lose_and(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return an action that first removes everything stored, so that it is stored again."""

        def act() -> None:
            self.store.lose_everything()
            self.settle()
            action()

        return act


@pytest.mark.long
@pytest.mark.parametrize(("store", "part"), PARTS, indirect=["store"])
@pytest.mark.parametrize("lab", BOTH, indirect=True)
def test_a_part_is_killed_and_suspended_in_loads_and_stores(lab: Lab, store: Store, part: str, tmp_path: Path) -> None:
    lines: list[str] = []  # what the engine logs
    hurt = Hurt(store, part, tmp_path / "order", lines)
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    run = PhasedRun(
        lab,
        lab.prompts(700, 1283, family=110),
        [
            Phase("first", served=False),
            Phase("well", served=True),
            Phase("killed in a load", hurt.during("load_into", kill)),
            Phase("gone", hurt.check),
            Phase("back", hurt.start_again),
            Phase("stored again", hurt.settle),
            Phase("well again", hurt.settle, served=True),
            Phase("suspended in a load", hurt.during("load_into", stop)),
            Phase("suspended still", hurt.check),
            Phase("it goes on", hurt.resume),
            Phase("stored once more", hurt.settle),
            Phase("well after the load", hurt.settle, served=True),
            Phase("killed in a store", hurt.lose_and(hurt.during("store", kill)), served=False),
            Phase("back after the store", hurt.start_again),
            Phase("stored after the store", hurt.settle),
            Phase("well after the store", hurt.settle, served=True),
            Phase("suspended in a store", hurt.lose_and(hurt.during("store", stop)), served=False),
            Phase("it goes on with the store", hurt.resume),
            Phase("stored after all", hurt.settle),
            Phase("well after all", hurt.settle, served=True),
        ],
        lines,
    )
    env = {**installed(tmp_path, "signals_in_calls"), ORDER_VARIABLE: str(hurt.order)}
    result = run.run(transfer(tier_of(store, **store.short_deadlines)), env)
    for phase in run.phases:
        seconds = run.slowest_seconds(result, phase.name)
        assert seconds < LOOKUP_SECONDS + LOAD_SECONDS + SLACK_SECONDS, (phase.name, seconds)
    assert count(result, "load_corrupt", TIER) == 0
    said = logged_problems(run.lines)
    assert 0 < len(said) <= 24, said
    assert logged_tracebacks(run.lines) == []
    assert result.shutdown_seconds < 10
