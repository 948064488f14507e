"""Memory that tiers lend for the stores of a step, asked for before the engine computes the step.

So a tier has the whole time of the computation for its answer, and the engine thread never waits for it. An object
whose answer comes too late is copied to staging memory instead.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.tiers.calls.lent_objects import LendingEnd, LentObject, WantedObject
from offload_core.tiers.tier import Tier

_MESSAGE_OBJECTS = 256
"""Objects in one request."""


class StoreGrants:
    """Answers of lending tiers, until the engine thread takes them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[ObjectKey, object] = {}
        """Per key of an object whose answer is wanted, the request."""
        self._answers: dict[ObjectKey, LentObject | StoreOutcome] = {}

    def expect(self, wanted: Sequence[WantedObject]) -> list[tuple[object, Sequence[WantedObject]]]:
        """Prepare requests, for :meth:`start`."""
        parts = [wanted[start : start + _MESSAGE_OBJECTS] for start in range(0, len(wanted), _MESSAGE_OBJECTS)]
        requests = [(object(), part) for part in parts]
        with self._lock:
            for request, part in requests:
                self._expected.update((one.key, request) for one in part)
        return requests

    def start(self, tier: Tier, request: object, wanted: Sequence[WantedObject]) -> None:
        """Ask a tier to lend memory. May be called on any thread."""

        def ended(end: LendingEnd[StoreOutcome] | None) -> None:
            nothing: LendingEnd[StoreOutcome] = LendingEnd([None] * len(wanted), [None] * len(wanted))
            self._answered(request, wanted, end or nothing)

        tier.lending.start_reserve(wanted, ended)

    def take(self, key: ObjectKey) -> LentObject | StoreOutcome | None:
        """Return the answer for an object: its memory or a final outcome. ``None`` if there is none, and never will be.

        The caller releases the memory.
        """
        with self._lock:
            self._expected.pop(key, None)
            return self._answers.pop(key, None)

    def drop(self) -> None:
        """Want no more answers, and give back the memory that nobody has taken."""
        with self._lock:
            unused = list(self._answers.values())
            self._answers.clear()
            self._expected.clear()
        for answer in unused:
            if isinstance(answer, LentObject):
                answer.release()

    def _answered(self, request: object, wanted: Sequence[WantedObject], end: LendingEnd[StoreOutcome]) -> None:
        unused: list[LentObject] = []
        with self._lock:
            for one, outcome, lent in zip(wanted, end.outcomes, end.lent, strict=True):
                answer = lent if outcome is None else outcome
                is_expected = self._expected.get(one.key) is request
                if is_expected and answer is not None:
                    self._answers[one.key] = answer
                elif is_expected:
                    del self._expected[one.key]  # it is not lent
                elif lent is not None:
                    unused.append(lent)
        for lent in unused:
            lent.release()
