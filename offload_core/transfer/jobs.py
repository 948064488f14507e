"""The states of jobs, and the table of all jobs. A job is one request's load, or one batch's store on one tier.

A *verdict* ends a job for its caller: done, failed, timed out or cancelled. Each job has exactly one verdict. After it,
the job is *draining* while a backend's call still holds buffers for it (a hung read keeps its memory, invariant I3). It
is *retired* as soon as it holds no buffer.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from offload_core.runtime.metrics import Counters


class JobState(enum.Enum):
    """The state of a job."""

    SUBMITTED = "submitted"
    """It waits for a slot."""
    RUNNING = "running"
    """A backend works on it."""
    DONE = "done"
    """Verdict: all objects were moved."""
    FAILED = "failed"
    """Verdict: some object was not moved."""
    TIMED_OUT = "timed out"
    """Verdict: its deadline passed."""
    CANCELLED = "cancelled"
    """Verdict: its caller no longer needs it."""
    DRAINING = "draining"
    """It has its verdict, but a backend's calls still hold buffers for it."""
    RETIRED = "retired"
    """It has its verdict and holds no buffers."""


VERDICTS: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED})
"""The states that end a job for its caller."""

_AFTER_VERDICT: Final = frozenset({JobState.DRAINING, JobState.RETIRED})

TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    JobState.SUBMITTED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED}),
    JobState.RUNNING: VERDICTS,
    JobState.DONE: _AFTER_VERDICT,
    JobState.FAILED: _AFTER_VERDICT,
    JobState.TIMED_OUT: _AFTER_VERDICT,
    JobState.CANCELLED: _AFTER_VERDICT,
    JobState.DRAINING: frozenset({JobState.RETIRED}),
    JobState.RETIRED: frozenset(),
}
"""Per state, the states that may follow. :meth:`JobTable.end` moves a verdict on to draining or retired at once."""

_COUNTERS: Final = {
    JobState.DONE: "jobs_done",
    JobState.FAILED: "jobs_failed",
    JobState.TIMED_OUT: "jobs_timed_out",
    JobState.CANCELLED: "jobs_cancelled",
    JobState.RETIRED: "jobs_retired",
}

_generations = count(1)


class JobError(RuntimeError):
    """A job's state does not allow an operation: a defect of the core."""


@dataclass(eq=False)
class Job:
    """One job. Any thread may read it; only its :class:`JobTable` changes it.

    Args:
        generation: unique in the process and never used again. It is the fence: an arrival is dropped if the job of its
            generation has ended.
        deadline: the latest time for its verdict, by the monotonic clock in seconds.
    """

    generation: int
    kind: Literal["load", "store"]
    tier: str
    deadline: float
    state: JobState = JobState.SUBMITTED
    verdict: JobState | None = None
    """One of :data:`VERDICTS`, or ``None`` until the job has ended."""
    leases: int = 0
    """Number of buffers that it holds."""

    @property
    def ended(self) -> bool:
        """True if it has its verdict."""
        return self.verdict is not None

    def __repr__(self) -> str:
        verdict = f", {self.verdict.value}" if self.verdict else ""
        return f"{self.kind} job {self.generation} on tier {self.tier!r} ({self.state.value}{verdict})"


class JobTable:
    """All jobs of one transfer engine until they are retired. Thread-safe; no method waits.

    Every job counts in ``jobs``, in the counter of its one verdict and in ``jobs_retired``. So the sums agree when no
    job is under way. The gauge ``draining_leases`` counts the buffers that jobs hold after their verdict.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._live: dict[int, Job] = {}

    @property
    def live(self) -> tuple[Job, ...]:
        """The jobs that are not retired, in order of submission."""
        with self._lock:
            return tuple(self._live.values())

    def submit(self, kind: Literal["load", "store"], tier: str, deadline: float) -> Job:
        """Add a job.

        Args:
            tier: the tier's name.
            deadline: by the monotonic clock, in seconds.
        """
        with self._lock:
            job = Job(next(_generations), kind, tier, deadline)
            self._live[job.generation] = job
            self._counters.add("jobs", tier)
            return job

    def start(self, job: Job) -> bool:
        """Note that a backend is about to work on the job, for the first time or again.

        Returns:
            ``False`` if the job already has its verdict: the caller does no work for it.
        """
        with self._lock:
            if job.ended:
                return False
            if job.state is JobState.SUBMITTED:
                self._move(job, JobState.RUNNING)
            return True

    def hold(self, job: Job, leases: int) -> bool:
        """Add buffers to those that the job holds; each goes through :meth:`release` once.

        Returns:
            ``False``, without any change, if the job already has its verdict. No work may begin for it, so the caller
            releases the buffers.

        Raises:
            JobError: ``leases`` is negative.
        """
        if leases < 0:
            raise JobError(f"{job} cannot hold {leases} buffers; it must be 0 or more")
        with self._lock:
            if job.ended:
                return False
            job.leases += leases
            return True

    def release(self, job: Job, leases: int) -> None:
        """Note that the calls on some of the job's buffers have really ended. The last release retires an ended job.

        Raises:
            JobError: the job holds fewer than ``leases`` buffers.
        """
        with self._lock:
            if not 0 <= leases <= job.leases:
                raise JobError(f"{job} cannot release {leases} buffers; it holds {job.leases}")
            job.leases -= leases
            if job.state is JobState.DRAINING:
                self._counters.add("draining_leases", job.tier, -leases)
                if not job.leases:
                    self._move(job, JobState.RETIRED)

    def end(self, job: Job, verdict: JobState) -> None:
        """Publish the job's verdict, one of :data:`VERDICTS`, and go on to draining or retired.

        Raises:
            JobError: it has a verdict already, or its state does not allow this verdict.
        """
        with self._lock:
            if verdict not in VERDICTS:
                good = ", ".join(sorted(state.value for state in VERDICTS))
                raise JobError(f"{job} cannot end as {verdict.value!r}; verdicts are: {good}")
            self._move(job, verdict)
            job.verdict = verdict
            self._move(job, JobState.DRAINING if job.leases else JobState.RETIRED)
            if job.leases:
                self._counters.add("draining_leases", job.tier, job.leases)

    def _move(self, job: Job, state: JobState) -> None:
        """Change a job's state and count it. The caller holds the lock."""
        if state not in TRANSITIONS[job.state]:
            good = ", ".join(sorted(other.value for other in TRANSITIONS[job.state])) or "none"
            raise JobError(f"{job} cannot become {state.value!r}; states that may follow: {good}")
        job.state = state
        if state in _COUNTERS:
            self._counters.add(_COUNTERS[state], job.tier)
        if state is JobState.RETIRED:
            del self._live[job.generation]
