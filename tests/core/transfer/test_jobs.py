"""Jobs: one verdict each, and only allowed transitions. An oracle has its own copy of the rules."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from offload_core.runtime.metrics import Counters
from offload_core.transfer.jobs import TRANSITIONS, VERDICTS, Job, JobError, JobState, JobTable

TIERS = ("fast", "slow")
ENDS = {
    JobState.DONE: "jobs_done",
    JobState.FAILED: "jobs_failed",
    JobState.TIMED_OUT: "jobs_timed_out",
    JobState.CANCELLED: "jobs_cancelled",
}


@dataclass
class Expected:
    """The oracle's state of a job."""

    tier: str
    started: bool = False
    verdict: JobState | None = None
    held: int = 0

    @property
    def state(self) -> JobState:
        if self.verdict is None:
            return JobState.RUNNING if self.started else JobState.SUBMITTED
        return JobState.DRAINING if self.held else JobState.RETIRED


class Jobs(RuleBasedStateMachine):
    """The oracle records the operations on each job and derives its state and all counts from them."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.table = JobTable(self.counters)
        self.expected: dict[Job, Expected] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    @rule(target=jobs, tier=st.sampled_from(TIERS), kind=st.sampled_from(["load", "store"]))
    def submit(self, tier: str, kind: str) -> Job:
        job = self.table.submit("load" if kind == "load" else "store", tier, deadline=7.5)
        assert (job.kind, job.tier, job.deadline) == (kind, tier, 7.5)
        assert job.generation not in {other.generation for other in self.expected}
        self.expected[job] = Expected(tier)
        return job

    @rule(job=jobs)
    def start(self, job: Job) -> None:
        expected = self.expected[job]
        goes_on = expected.verdict is None
        assert self.table.start(job) is goes_on
        expected.started |= goes_on

    @rule(job=jobs, leases=st.integers(-1, 3))
    def hold(self, job: Job, leases: int) -> None:
        expected = self.expected[job]
        if leases < 0:
            with pytest.raises(JobError, match=r"cannot hold -1 buffers; it must be 0 or more"):
                self.table.hold(job, leases)
        elif expected.verdict is not None:
            assert not self.table.hold(job, leases)
        else:
            assert self.table.hold(job, leases)
            expected.held += leases

    @rule(job=jobs, leases=st.integers(-1, 4))
    def release(self, job: Job, leases: int) -> None:
        expected = self.expected[job]
        if 0 <= leases <= expected.held:
            self.table.release(job, leases)
            expected.held -= leases
        else:
            with pytest.raises(JobError, match=f"cannot release {leases} buffers; it holds {expected.held}"):
                self.table.release(job, leases)

    @rule(job=jobs, verdict=st.sampled_from(JobState))
    def end(self, job: Job, verdict: JobState) -> None:
        expected = self.expected[job]
        allowed = verdict in ENDS and expected.verdict is None and (expected.started or verdict is not JobState.DONE)
        if allowed:
            self.table.end(job, verdict)
            expected.verdict = verdict
        else:
            with pytest.raises(JobError, match=r"cannot (end as|become) '"):
                self.table.end(job, verdict)

    @invariant()
    def every_job_is_what_the_oracle_says(self) -> None:
        for job, expected in self.expected.items():
            assert (job.state, job.verdict, job.leases) == (expected.state, expected.verdict, expected.held)
        assert self.table.live == tuple(
            j for j, expected in self.expected.items() if expected.state is not JobState.RETIRED
        )

    @invariant()
    def every_count_is_what_the_oracle_says(self) -> None:
        self.counts.update(self.counters.take())
        wanted: Counter[tuple[str, str]] = Counter()
        for expected in self.expected.values():
            wanted["jobs", expected.tier] += 1
            if expected.verdict is not None:
                wanted[ENDS[expected.verdict], expected.tier] += 1
                wanted["draining_leases", expected.tier] += expected.held
            wanted["jobs_retired", expected.tier] += expected.state is JobState.RETIRED
        assert +self.counts == +wanted


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_table_has_every_state_and_nothing_follows_the_last_one() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert TRANSITIONS[JobState.RETIRED] == frozenset()
    assert set(ENDS) == VERDICTS
    followed = frozenset[JobState]().union(*TRANSITIONS.values())
    assert followed == set(JobState) - {JobState.SUBMITTED}, "a state that nothing leads to"


def test_a_second_verdict_is_refused_with_the_jobs_state() -> None:
    table = JobTable(Counters())
    job = table.submit("load", "disk", 1.0)
    table.end(job, JobState.TIMED_OUT)
    with pytest.raises(
        JobError, match=rf"load job {job.generation} on tier 'disk' \(retired, timed out\) cannot become"
    ):
        table.end(job, JobState.CANCELLED)


def test_of_verdicts_that_come_at_once_one_is_published_and_nothing_is_counted_twice() -> None:
    counters = Counters()
    table = JobTable(counters)
    at_once = threading.Barrier(4)
    refused: list[JobError] = []

    def end(jobs: list[Job], verdict: JobState) -> None:
        for job in jobs:
            held = table.hold(job, 2)
            at_once.wait(30)
            try:
                table.end(job, verdict)
            except JobError as error:
                refused.append(error)
            if held:
                table.release(job, 2)

    jobs = [table.submit("load", "disk", 1.0) for _ in range(200)]
    for job in jobs:
        table.start(job)
    threads = [threading.Thread(target=end, args=(jobs, verdict)) for verdict in VERDICTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 600
    assert table.live == ()
    counts = counters.take()
    assert counts["jobs", "disk"] == counts["jobs_retired", "disk"] == 200
    assert sum(counts.get((name, "disk"), 0) for name in ENDS.values()) == 200
    assert ("draining_leases", "disk") not in counts
