"""The answers about keys: one question per key, no wait, and misses that stay misses while a request may ask."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload_core.elsewhere.verdicts import Verdicts

KEYS = st.integers(0, 4)
REQUESTS = st.sampled_from(["a", "b", "c"])


class Medium(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Sequence[int], Future[list[str | None]]]] = []
        self.verdicts: Verdicts[int] = Verdicts(self._find)
        self.seen: dict[int, set[str]] = {}
        """Per key, the running requests that have asked for it."""
        self.final: dict[int, str | None] = {}

    def _find(self, keys: Sequence[int]) -> Future[list[str | None]]:
        answer: Future[list[str | None]] = Future()
        self.asked.append((keys, answer))
        return answer

    @rule(key=KEYS, request=REQUESTS)
    def ask(self, key: int, request: str) -> None:
        verdict = self.verdicts.ask(key, request)
        self.seen.setdefault(key, set()).add(request)
        if key in self.final:
            assert (verdict.is_open, verdict.tier) == (False, self.final[key]), "an answer has changed"
        elif not verdict.is_open:
            self.final[key] = verdict.tier

    @rule()
    def flush(self) -> None:
        before = len(self.asked)
        self.verdicts.flush()
        for keys, _ in self.asked[before:]:
            assert set(keys) <= self.seen.keys()
            assert not set(keys) & self.final.keys(), "a key with an answer is asked again"

    @rule(tier=st.sampled_from([None, "disk"]), fails=st.booleans())
    def answer(self, tier: str | None, fails: bool) -> None:
        if self.asked:
            keys, future = self.asked.pop(0)
            future.set_exception(OSError()) if fails else future.set_result([tier] * len(keys))

    @rule(key=KEYS)
    def doubt(self, key: int) -> None:
        self.verdicts.doubt([key])
        if key in self.seen:
            self.final[key] = None

    @rule(request=REQUESTS)
    def end(self, request: str) -> None:
        self.verdicts.request_ended(request)
        for key in list(self.seen):
            self.seen[key].discard(request)
            if not self.seen[key]:
                del self.seen[key]
                self.final.pop(key, None)

    @invariant()
    def nothing_is_kept_for_requests_that_have_ended(self) -> None:
        assert self.verdicts._verdicts.keys() == self.seen.keys()


TestVerdicts = Medium.TestCase
