"""The states of a job, and the table that keeps them: a load of one request, or a store of one batch on one tier.

A *verdict* says how a job has ended for whoever waits for it: done, failed, timed out or cancelled. A job has exactly
one. It is *draining* while a call of a backend still holds buffers for it after that (a hung read keeps its memory,
invariant I3), and *retired* as soon as nothing is held.
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
    """Where a job stands."""

    SUBMITTED = "submitted"
    """It waits for its turn."""
    RUNNING = "running"
    """A backend has been asked."""
    DONE = "done"
    """Verdict: all of it was moved."""
    FAILED = "failed"
    """Verdict: some of it was not."""
    TIMED_OUT = "timed out"
    """Verdict: its deadline came first."""
    CANCELLED = "cancelled"
    """Verdict: nobody wants it any more."""
    DRAINING = "draining"
    """It has its verdict, and calls of the backend still hold buffers for it."""
    RETIRED = "retired"
    """It has its verdict, and nothing is held for it."""


VERDICTS: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED})
"""The states that end a job for whoever waits for it."""

_LET_GO: Final = frozenset({JobState.DRAINING, JobState.RETIRED})

TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    JobState.SUBMITTED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.TIMED_OUT, JobState.CANCELLED}),
    JobState.RUNNING: VERDICTS,
    JobState.DONE: _LET_GO,
    JobState.FAILED: _LET_GO,
    JobState.TIMED_OUT: _LET_GO,
    JobState.CANCELLED: _LET_GO,
    JobState.DRAINING: frozenset({JobState.RETIRED}),
    JobState.RETIRED: frozenset(),
}
"""Which state may follow which. A verdict is left at once: :meth:`JobTable.end` goes on to draining or retired."""

_COUNTERS: Final = {
    JobState.DONE: "jobs_done",
    JobState.FAILED: "jobs_failed",
    JobState.TIMED_OUT: "jobs_timed_out",
    JobState.CANCELLED: "jobs_cancelled",
    JobState.RETIRED: "jobs_retired",
}

_generations = count(1)


class JobError(RuntimeError):
    """A job was asked for something that its state does not allow: a defect of the core."""


@dataclass(eq=False)
class Job:
    """One job. Anyone may read it; only its :class:`JobTable` changes it.

    Args:
        generation: unique in the process and never used again. It is the fence: what arrives for a generation that
            nobody wants any more is dropped.
        deadline: when its verdict is due at the latest, by the monotonic clock.
    """

    generation: int
    kind: Literal["load", "store"]
    tier: str
    deadline: float
    state: JobState = JobState.SUBMITTED
    verdict: JobState | None = None
    """One of :data:`VERDICTS`, as soon as there is one."""
    leases: int = 0
    """How many buffers are held for it."""

    @property
    def ended(self) -> bool:
        """Whether it has its verdict."""
        return self.verdict is not None

    def __repr__(self) -> str:
        verdict = f", {self.verdict.value}" if self.verdict else ""
        return f"{self.kind} job {self.generation} on tier {self.tier!r} ({self.state.value}{verdict})"


class JobTable:
    """All jobs of one transfer engine until they are retired. Thread-safe; no method waits.

    Every job is counted in ``jobs``, in the counter of its one verdict and in ``jobs_retired``, so that these add up
    when nothing is under way. The gauge ``draining_leases`` says what is held for jobs that have their verdict.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._live: dict[int, Job] = {}

    @property
    def live(self) -> tuple[Job, ...]:
        """The jobs that are not retired, in the order in which they were submitted."""
        with self._lock:
            return tuple(self._live.values())

    def submit(self, kind: Literal["load", "store"], tier: str, deadline: float) -> Job:
        """Begin a job.

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
        """Note that a backend is about to be asked, for the first time or once more.

        Returns:
            ``False`` when the job has its verdict already, so that there is nothing to be done for it.
        """
        with self._lock:
            if job.ended:
                return False
            if job.state is JobState.SUBMITTED:
                self._move(job, JobState.RUNNING)
            return True

    def hold(self, job: Job, leases: int) -> bool:
        """Note buffers that the job holds from now on; each is to be told to :meth:`let_go` once.

        Returns:
            ``False``, and nothing noted, when the job has its verdict already: nothing may begin for it any more, so
            the caller gives the buffers back.

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

    def let_go(self, job: Job, leases: int) -> None:
        """Note that the calls on some of the job's buffers have really ended. The last one retires an ended job.

        Raises:
            JobError: it does not hold so many.
        """
        with self._lock:
            if not 0 <= leases <= job.leases:
                raise JobError(f"{job} cannot let go of {leases} buffers; it holds {job.leases}")
            job.leases -= leases
            if job.state is JobState.DRAINING:
                self._counters.add("draining_leases", job.tier, -leases)
                if not job.leases:
                    self._move(job, JobState.RETIRED)

    def end(self, job: Job, verdict: JobState) -> None:
        """Publish the job's verdict, one of :data:`VERDICTS`, and go on to draining or retired.

        Raises:
            JobError: it has a verdict, or that state may not follow its own.
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
        """Change a job's state and count it. Called under the lock."""
        if state not in TRANSITIONS[job.state]:
            good = ", ".join(sorted(other.value for other in TRANSITIONS[job.state])) or "none"
            raise JobError(f"{job} cannot become {state.value!r}; states that may follow: {good}")
        job.state = state
        if state in _COUNTERS:
            self._counters.add(_COUNTERS[state], job.tier)
        if state is JobState.RETIRED:
            del self._live[job.generation]
