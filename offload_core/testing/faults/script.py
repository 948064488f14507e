"""A seeded script of faults for media in use: phases in which they are well, and phases in which they are sick.

Usually it wraps every tier of an engine, in a plugin's ``offload_wrap_backend``, and a test starts and stops it::

    SCRIPT = FaultScript(ScriptSettings(deadline_seconds=0.5))

    @hookimpl
    def offload_wrap_backend(backend, tier):
        return SCRIPT.wrap(backend)

    ...
    SCRIPT.start(seed=7)
    ...                     # the engine serves
    SCRIPT.stop()
    assert SCRIPT.injected().keys() >= {"hang", "raise"}

The seed alone decides the phases: their length, their kinds of fault, and each fault's operation, chance and duration.
Within a phase a :class:`FaultPlan` picks the calls and objects to hit, by seed and keys. The times of the calls decide
the phase that each call falls into, as in production.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload_core.api.backend import Backend
from offload_core.testing.faults.faulty_backend import FaultyBackend
from offload_core.testing.faults.journal import ScriptJournal
from offload_core.testing.faults.kinds import Fail, FlipBit, Full, Late, Lie, Lose, Reorder, Slow, Stall, Truncate
from offload_core.testing.faults.plan import Call, Fault, FaultPlan, Inject, Injected

_MEDIUM_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EACCES)

_Entry = tuple[Fault, str]
"""A fault, and the operation that it hits."""


@dataclass(frozen=True)
class ScriptSettings:
    """The ranges that a script draws from. A pair is the least and the greatest value of an even distribution.

    Args:
        deadline_seconds: the longest deadline of the calls; a ``late`` call takes up to twice as long.
        hang_seconds: the time for which a thread of the tier hangs.
        well_seconds: the length of a phase without faults.
        well_calls: the calls after which a phase without faults ends, if they come before its time is over.
        sick_seconds: the length of a phase with faults.
        sick_calls: the calls after which a phase with faults ends, if they come before its time is over.
        kinds: the kinds of fault to use, keys of :data:`FAULT_KINDS`.
        kinds_at_once: the number of kinds in a sick phase.
        chance: the probability of a fault in a sick phase, per object or per call as the fault's ``per_object`` says.
        lookup_share: the factor for that probability in ``contains``. It is small because an object is loaded only
            after a lookup has found it.

    Raises:
        ValueError: ``kinds`` is empty, or names an unknown kind or a kind twice.
    """

    deadline_seconds: float = 0.5
    hang_seconds: tuple[float, float] = (1.0, 3.0)
    well_seconds: tuple[float, float] = (0.2, 1.0)
    well_calls: tuple[int, int] = (5, 40)
    sick_seconds: tuple[float, float] = (0.5, 2.0)
    sick_calls: tuple[int, int] = (5, 40)
    kinds: Sequence[str] = field(default_factory=lambda: tuple(FAULT_KINDS))
    kinds_at_once: int = 3
    chance: tuple[float, float] = (0.1, 0.6)
    lookup_share: float = 0.3

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(FAULT_KINDS) or len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"kinds={list(self.kinds)} must be some of {', '.join(FAULT_KINDS)}, each once")


def _delay(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    slow = Slow(draw.uniform(0.02, 0.4) * settings.deadline_seconds)
    return [(slow, name) for name in ("contains", "prepare_load", "load_into", "prepare_store", "store")]


def _hang(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    stall = Stall(draw.uniform(*settings.hang_seconds))
    return [(stall, name) for name in ("contains", "load_into", "store")]


def _late(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    late = Late(draw.uniform(1.05, 2.0) * settings.deadline_seconds)
    return [(late, name) for name in ("contains", "prepare_load", "load_into", "store")]


def _raise(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    fail = Fail(draw.choice(_MEDIUM_ERRORS), after=draw.random() < 0.3)
    return [(fail, name) for name in ("contains", "prepare_load", "load_into", "prepare_store", "store", "delete")]


def _short(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    truncate = Truncate(draw.choice((0.0, draw.random(), 0.999)))
    return [(truncate, name) for name in ("load_into", "store")]


def _wrong(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    faults: tuple[Fault, ...] = (FlipBit(), Reorder(buffers=True))
    return [*((fault, name) for fault in faults for name in ("load_into", "store")), (Lie(), "load_into")]


def _phantom(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    return [(Lie(), name) for name in ("contains", "prepare_load", "store")]


def _lost(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    return [(Lose(), name) for name in ("contains", "prepare_load")]


def _full(draw: random.Random, settings: ScriptSettings) -> list[_Entry]:
    return [(Full(), "prepare_store"), (Fail(errno.ENOSPC), "store")]


FAULT_KINDS: Mapping[str, Callable[[random.Random, ScriptSettings], list[_Entry]]] = {
    "delay": _delay,  # slower, but within the deadline if nothing else delays the call
    "hang": _hang,  # threads of the tier hang for seconds
    "late": _late,  # the call ends after its deadline
    "raise": _raise,
    "short": _short,  # only a part of the bytes arrives
    "wrong": _wrong,  # the bytes differ from the stored bytes
    "phantom": _phantom,  # hits for objects that are not there
    "lost": _lost,  # objects vanish after a lookup has found them
    "full": _full,  # the medium is full
}
"""Every kind of fault by its name, with the function that draws its faults."""


_NAMES: Mapping[type[Fault], str] = {
    Slow: "delay", Stall: "hang", Late: "late", Truncate: "short", FlipBit: "wrong", Reorder: "wrong", Lose: "lost",
    Full: "full",
}  # fmt: skip


def kind_of(fault: Fault, operation: str) -> str:
    """Return the kind, a key of :data:`FAULT_KINDS`, of a fault that a script has drawn."""
    match fault:
        case Lie():
            return "wrong" if operation == "load_into" else "phantom"
        case Fail():
            return "full" if fault.error == errno.ENOSPC else "raise"
    return _NAMES[type(fault)]


@dataclass(frozen=True)
class Phase:
    """A time in which the medium is well, or has a fixed set of faults.

    Args:
        seconds: the length of the phase from its first call on; the next call after it begins the next phase.
        calls: the calls after which the phase ends, if they come before ``seconds`` are over.
        faults: the faults; empty if the medium is well.
    """

    seconds: float
    calls: int
    faults: tuple[Inject, ...] = ()


def phases(seed: int | str, settings: ScriptSettings) -> Iterator[Phase]:
    """Yield the phases of a seed without end: sick and well in turn, the first one sick.

    Kinds are drawn without replacement, so every kind comes up before one comes up again. A phase has at least half of
    the pairs of fault and operation that a kind may have.
    """
    draw = random.Random(f"faults:{seed}")
    undrawn: list[str] = []
    while True:
        drawn_kinds: list[str] = []
        while len(drawn_kinds) < min(settings.kinds_at_once, len(settings.kinds)):
            if not undrawn:
                undrawn = draw.sample(list(settings.kinds), len(settings.kinds))
                undrawn.sort(key=lambda kind: kind not in drawn_kinds)  # kinds of this phase are drawn last
            drawn_kinds.append(undrawn.pop())
        faults: list[Inject] = []
        for kind in drawn_kinds:
            drawn = FAULT_KINDS[kind](draw, settings)
            for fault, operation in draw.sample(drawn, draw.randint(-(-len(drawn) // 2), len(drawn))):
                share = settings.lookup_share if operation == "contains" else 1.0
                faults.append(Inject(fault, operation, share * draw.uniform(*settings.chance)))
        yield Phase(draw.uniform(*settings.sick_seconds), draw.randint(*settings.sick_calls), tuple(faults))
        yield Phase(draw.uniform(*settings.well_seconds), draw.randint(*settings.well_calls))


class _ScriptPlan(FaultPlan):
    """A plan that follows the phases of a script, and counts its faults by kind and operation."""

    def __init__(self, settings: ScriptSettings, clock: Callable[[], float], journal: ScriptJournal | None) -> None:
        super().__init__(())
        self._settings = settings
        self._clock = clock
        self._journal = journal
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._phases: Iterator[Phase] | None = None
        self._current = FaultPlan(())
        self._ends = 0.0
        self._calls_left = 0
        self._phases_begun = 0

    def restart(self, seed: int | str | None) -> None:
        """Begin the phases of a seed; ``None`` lets new calls through without faults."""
        with self._lock:
            if self._journal is not None:
                self._journal.add("restart", seed)
                self._follow()
            else:
                self._restart(seed)

    def _restart(self, seed: int | str | None) -> None:
        self._phases = None if seed is None else phases(seed, self._settings)
        self.seed = random.Random(f"plan:{seed}").getrandbits(32)
        self._calls_left = 0
        if seed is not None:
            self._phases_begun = 0

    def _follow(self) -> None:
        """Take up the lines of all processes."""
        for word, *rest in self._journal.new_lines() if self._journal is not None else ():
            if word == "restart":
                self._restart(rest[0])
            elif word == "phase":
                self._phases_begun += 1
            elif word == "injected":
                self._counts[str(rest[0]), str(rest[1])] += 1

    @property
    def phases_begun(self) -> int:
        """Number of phases that have begun since the last start."""
        with self._lock:
            self._follow()
            return self._phases_begun

    def choose(self, call: Call) -> list[tuple[Fault, Call]]:
        """Return the faults of this call; the first call after the end of a phase begins the next phase."""
        with self._lock:
            self._follow()
            if self._phases is None:
                return []
            now = self._clock()
            if self._calls_left <= 0 or now >= self._ends:
                phase = next(self._phases)
                self._ends, self._calls_left = now + phase.seconds, phase.calls
                self._current = FaultPlan(phase.faults, seed=self.seed + self._phases_begun)
                if self._journal is not None:
                    self._journal.add("phase")
                else:
                    self._phases_begun += 1
            self._calls_left -= 1
            return self._current.choose(call)

    def record(self, injected: Injected) -> None:
        """Count the fault without keeping it, because a script may run for days."""
        kind = kind_of(injected.fault, injected.operation)
        with self._lock:
            if self._journal is not None:
                self._journal.add("injected", kind, injected.operation)
            else:
                self._counts[kind, injected.operation] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of faulty calls per kind and operation."""
        with self._lock:
            self._follow()
            return dict(self._counts)


class FaultScript:
    """A script of faults for the backends that it wraps. No fault happens before :meth:`start`.

    All wrapped backends share the phases, for example if both halves of an engine open a tier. Every method may be
    called from any thread.

    Args:
        settings: the ranges that the script draws from.
        clock: the clock for the phases, in seconds.
        journal: a file that is the same for all processes, if the backends run in an I/O process. Scripts with one
            file start and stop together, and each of them counts the faults of all.
    """

    def __init__(
        self,
        settings: ScriptSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Path | None = None,
    ) -> None:
        self.settings = settings or ScriptSettings()
        self._plan = _ScriptPlan(self.settings, clock, None if journal is None else ScriptJournal(journal))

    def wrap(self, backend: Backend[Any]) -> Backend[Any]:
        """Return a backend around ``backend`` that the script drives."""
        return FaultyBackend(backend, self._plan)

    def start(self, seed: int | str) -> None:
        """Play the script of ``seed`` from its beginning. Calls that hang or are late already go on to their end."""
        self._plan.restart(seed)

    def stop(self) -> None:
        """Let new calls through without faults. Calls that hang or are late already go on to their end."""
        self._plan.restart(None)

    @property
    def phases_begun(self) -> int:
        """Number of phases that have begun since the last start."""
        return self._plan.phases_begun

    def injected(self) -> dict[str, dict[str, int]]:
        """Return the number of faulty calls so far, over all seeds, per kind and operation.

        A fault without effect, such as a wrong byte in a miss, is not counted.
        """
        report: dict[str, dict[str, int]] = {}
        for (kind, operation), count in sorted(self._plan.counts().items()):
            report.setdefault(kind, {})[operation] = count
        return report
