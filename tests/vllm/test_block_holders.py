"""A request whose load has failed never gets stuck in vLLM's scheduler, nor gets another one stuck."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from offload_core.vllm.scheduler.block_holders import BlockHolders


@dataclass
class Waiting:
    """A request that holds blocks while it waits, as vLLM's scheduler has it."""

    name: str
    held: int
    needed: int
    fails: bool
    reported: bool = False


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, list[Waiting]]:
    """A pool and requests that fit into it together while they load; each would fit alone with all its tokens."""
    num_blocks = draw(st.integers(1, 40))
    requests: list[Waiting] = []
    free = num_blocks
    while free and draw(st.booleans()):
        held = draw(st.integers(1, free))
        fails = draw(st.booleans())
        # A loaded request needs no more blocks here; a failed one needs all of its blocks at once.
        needed = draw(st.integers(held, num_blocks)) if fails else held
        requests.append(Waiting(f"r{len(requests)}", held, needed, fails))
        free -= held
    return num_blocks, requests


def schedule(num_blocks: int, queue: list[Waiting]) -> list[str]:
    """Run vLLM's scheduler once over requests that hold blocks; return the requests that ran and finished."""
    ran: list[str] = []
    for request in list(queue):
        if not request.reported:
            continue
        if request.fails:
            request.held = 0
        if sum(other.held for other in queue) - request.held + request.needed > num_blocks:
            break
        queue.remove(request)
        ran.append(request.name)
    return ran


@given(pools(), st.randoms(use_true_random=False))
def test_every_request_runs_in_the_end(pool: tuple[int, list[Waiting]], random: object) -> None:
    num_blocks, queue = pool
    holders = BlockHolders(num_blocks)
    for request in queue:
        holders.load_begins(request.name, request.held, request.needed)
    loading = list(queue)
    random.shuffle(loading)  # type: ignore[attr-defined]
    for _ in range(3 * len(queue) + 1):
        if loading:
            ended = loading.pop()
            if ended.fails:
                holders.load_fails(ended.name)
            else:
                ended.reported = True
        reported = holders.reportable_failures()
        for request in queue:
            request.reported |= request.name in reported
        holders.remove(reported)
        holders.remove(schedule(num_blocks, queue))
    assert queue == []


def test_a_failure_is_reported_at_once_if_the_request_fits() -> None:
    holders = BlockHolders(100)
    holders.load_begins("a", 10, 40)
    holders.load_begins("b", 10, 40)
    holders.load_fails("a")
    assert holders.reportable_failures() == ["a"]


def test_a_failure_is_withheld_while_others_hold_the_blocks_that_it_needs() -> None:
    holders = BlockHolders(100)
    holders.load_begins("a", 10, 95)
    holders.load_begins("b", 10, 40)
    holders.load_fails("a")
    assert holders.reportable_failures() == []
    holders.remove(["b"])
    assert holders.reportable_failures() == ["a"]


def test_requests_that_wait_for_each_other_are_reported_last_one_first() -> None:
    holders = BlockHolders(100)
    for name in ("a", "b"):
        holders.load_begins(name, 40, 100)
        holders.load_fails(name)
    assert holders.reportable_failures() == ["b"]
    assert holders.withholds("a")
    holders.remove(["b"])
    assert holders.reportable_failures() == ["a"]


def test_a_request_that_never_loaded_is_no_holder() -> None:
    holders = BlockHolders(100)
    holders.load_fails("aborted")
    assert "aborted" not in holders
    assert not holders.withholds("aborted")
    assert holders.reportable_failures() == []
