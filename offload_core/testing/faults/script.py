"""A seeded script of faults for media in use: phases in which they are well, and phases in which they are sick.

Usually it wraps every tier of an engine, in a plugin's ``offload_wrap_backend``, while somebody else says when it
starts and stops::

    SCRIPT = FaultScript(ScriptSettings(deadline_seconds=0.5))

    @hookimpl
    def offload_wrap_backend(backend, tier):
        return SCRIPT.wrap(backend)

    ...
    SCRIPT.start(seed=7)
    ...                     # the engine serves
    SCRIPT.stop()
    assert SCRIPT.injected().keys() >= {"hang", "raise"}

The seed alone decides what the phases are: how long each lasts, which kinds of fault it has, in which operations, with
which chances and durations. Within a phase a :class:`FaultPlan` decides which calls and objects are hit, by seed and
keys. Which calls fall into which phase depends on who calls when, as in life.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload_core.api.backend import Backend
from offload_core.testing.faults.faulty_backend import FaultyBackend
from offload_core.testing.faults.kinds import Fail, FlipBit, Full, Late, Lie, Lose, Reorder, Slow, Stall, Truncate
from offload_core.testing.faults.plan import Call, Fault, FaultPlan, Inject, Injected

_MEDIUM_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EACCES)

_Entry = tuple[Fault, str]
"""A fault, and the operation that it happens in."""


@dataclass(frozen=True)
class ScriptSettings:
    """What a script may draw. Pairs are the least and the most of what is drawn evenly.

    Args:
        deadline_seconds: the longest deadline that the calls have; what is ``late`` takes up to twice as long.
        hang_seconds: for how long a thread of the tier hangs.
        well_seconds: how long a phase without faults lasts; it also ends after ``well_calls`` calls.
        sick_seconds: how long a phase with faults lasts; it also ends after ``sick_calls`` calls.
        kinds: the kinds of fault to use, keys of :data:`FAULT_KINDS`.
        kinds_at_once: how many of them a sick phase has.
        chance: how likely a fault of a sick phase is, per object or per call as the fault has it,
        lookup_share: and what part of that it is in ``contains``, behind which all else stands: nothing is loaded that
            no lookup has found.

    Raises:
        ValueError: a kind is not known or named twice, or there is none.
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
    "delay": _delay,  # slower, and still in time by itself
    "hang": _hang,  # threads of the tier stand still for seconds
    "late": _late,  # done after all, after the deadline
    "raise": _raise,
    "short": _short,  # only a part of the bytes arrives
    "wrong": _wrong,  # other bytes than were stored
    "phantom": _phantom,  # hits that are not there
    "lost": _lost,  # objects vanish once a lookup has found them
    "full": _full,  # the medium has no room
}
"""Every kind of fault by its name, and how its faults are drawn."""


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
    """A time in which the medium is well, or sick in one way.

    Args:
        seconds: it ends at the first call that comes so long after its own first call,
        calls: or at the first call after so many.
        faults: empty where the medium is well.
    """

    seconds: float
    calls: int
    faults: tuple[Inject, ...] = ()


def phases(seed: int | str, settings: ScriptSettings) -> Iterator[Phase]:
    """Yield the phases of a seed without end: sick and well in turn, the first one sick.

    The kinds are dealt like cards, so that each comes up before any comes up again. A kind has at least half of the
    faults, in as many operations, that it may have.
    """
    draw = random.Random(f"faults:{seed}")
    deck: list[str] = []
    while True:
        hand: list[str] = []
        while len(hand) < min(settings.kinds_at_once, len(settings.kinds)):
            if not deck:
                deck = draw.sample(list(settings.kinds), len(settings.kinds))
                deck.sort(key=lambda kind: kind not in hand)  # those in the hand are dealt last
            hand.append(deck.pop())
        faults: list[Inject] = []
        for kind in hand:
            drawn = FAULT_KINDS[kind](draw, settings)
            for fault, operation in draw.sample(drawn, draw.randint(-(-len(drawn) // 2), len(drawn))):
                share = settings.lookup_share if operation == "contains" else 1.0
                faults.append(Inject(fault, operation, share * draw.uniform(*settings.chance)))
        yield Phase(draw.uniform(*settings.sick_seconds), draw.randint(*settings.sick_calls), tuple(faults))
        yield Phase(draw.uniform(*settings.well_seconds), draw.randint(*settings.well_calls))


class _ScriptPlan(FaultPlan):
    """Asks the plan of the phase that is on, and counts what has happened by kind of fault and operation."""

    def __init__(self, settings: ScriptSettings, clock: Callable[[], float]) -> None:
        super().__init__(())
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._phases: Iterator[Phase] | None = None
        self._current = FaultPlan(())
        self._ends = 0.0
        self._calls_left = 0
        self.phases_begun = 0

    def restart(self, seed: int | str | None) -> None:
        """Begin the phases of a seed; ``None`` lets new calls through as they are."""
        with self._lock:
            self._phases = None if seed is None else phases(seed, self._settings)
            self.seed = random.Random(f"plan:{seed}").getrandbits(32)
            self._calls_left = 0
            if seed is not None:
                self.phases_begun = 0

    def choose(self, call: Call) -> list[tuple[Fault, Call]]:
        """Return the faults of this call; the first call after a phase's end begins the next one."""
        with self._lock:
            if self._phases is None:
                return []
            now = self._clock()
            if self._calls_left <= 0 or now >= self._ends:
                phase = next(self._phases)
                self._ends, self._calls_left = now + phase.seconds, phase.calls
                self._current = FaultPlan(phase.faults, seed=self.seed + self.phases_begun)
                self.phases_begun += 1
            self._calls_left -= 1
            return self._current.choose(call)

    def note(self, injected: Injected) -> None:
        """Count it, and keep nothing of it: a script may run for days."""
        with self._lock:
            self._counts[kind_of(injected.fault, injected.operation), injected.operation] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many calls were hit, per kind and operation."""
        with self._lock:
            return dict(self._counts)


class FaultScript:
    """Faults by a script, for every backend that it wraps. Until :meth:`start` nothing goes wrong.

    What happens to several backends, as when an engine opens a tier in both of its halves, happens in the same phases.
    All methods may be called from any thread.

    Args:
        settings: what may be drawn.
        clock: seconds, for the phases' durations.
    """

    def __init__(self, settings: ScriptSettings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings or ScriptSettings()
        self._plan = _ScriptPlan(self.settings, clock)

    def wrap(self, backend: Backend[Any]) -> Backend[Any]:
        """Return a backend around ``backend`` that the script drives."""
        return FaultyBackend(backend, self._plan)

    def start(self, seed: int | str) -> None:
        """Play the script of ``seed`` from its beginning. What hangs or is late from before goes on."""
        self._plan.restart(seed)

    def stop(self) -> None:
        """Let new calls through as they are. What hangs or is late goes on to its end."""
        self._plan.restart(None)

    @property
    def phases_begun(self) -> int:
        """How many phases have begun since the last start."""
        return self._plan.phases_begun

    def injected(self) -> dict[str, dict[str, int]]:
        """Return what has happened so far, over all seeds: per kind and operation, how many calls were hit.

        What found nothing to do, such as a wrong byte in a miss, is not counted.
        """
        report: dict[str, dict[str, int]] = {}
        for (kind, operation), count in sorted(self._plan.counts().items()):
            report.setdefault(kind, {})[operation] = count
        return report
