"""The chunks that the jobs of each request have moved, for one touch at the request's end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Use(Generic[Key]):
    jobs: int = 0
    has_ended: bool = False
    keys: dict[Key, None] = field(default_factory=dict)


class PromptUses(Generic[Key]):
    """The uses of prompts by running requests. All methods are for one thread.

    A prompt comes in several jobs, the head first. In the order of the jobs, a tier would evict the head first.
    """

    def __init__(self) -> None:
        self._uses: dict[str, _Use[Key]] = {}
        self._request_of: dict[int, str] = {}

    def request_begins(self, request: str) -> None:
        """Note a request, before its jobs."""
        self._uses[request] = _Use()

    def job_begins(self, job: int, request: str, keys: Sequence[Key]) -> None:
        """Note a job, whose keys come after those of the request's jobs before. A late job stands for itself."""
        use = self._uses.setdefault(request, _Use(has_ended=True))
        use.jobs += 1
        use.keys.update(dict.fromkeys(keys))
        self._request_of[job] = request

    def job_ended(self, job: int) -> list[Key]:
        """Return the keys to touch now, in this order: none while the request or another of its jobs goes on."""
        request = self._request_of.pop(job)
        self._uses[request].jobs -= 1
        return self._take(request)

    def request_ended(self, request: str) -> list[Key]:
        """Return the keys to touch now, in this order: none while a job of the request goes on."""
        if request not in self._uses:
            return []
        self._uses[request].has_ended = True
        return self._take(request)

    def _take(self, request: str) -> list[Key]:
        use = self._uses[request]
        if use.jobs or not use.has_ended:
            return []
        del self._uses[request]
        return list(reversed(use.keys))
