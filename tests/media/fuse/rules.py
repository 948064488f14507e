"""What a fault file system does wrong: rules in a file that the daemon reads again whenever it has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

Fault = Literal["hang", "delay", "error", "cut", "part", "flip"]


@dataclass(frozen=True)
class Rule:
    """One thing that goes wrong, from when it is in the file until it is not.

    Args:
        number: its own, by which hits are told apart.
        operations: names of FUSE operations, such as ``read``, ``getattr`` or ``rename``; ``*`` is every one.
        paths: a pattern for paths below the mount, which start with ``/``; its ``*`` also matches slashes.
        fault: ``hang`` until the rule is gone; ``delay`` by ``seconds``; ``error`` with ``errno``; ``cut``: a read sees
            the file end at its half; ``part``: a read or write does half of what it was asked for, as POSIX allows;
            ``flip``: the first bit of what is read or written is the wrong one.
        seconds: of a delay.
        errno: of an error.
    """

    number: int
    operations: tuple[str, ...]
    paths: str
    fault: Fault
    seconds: float = 0.0
    errno: int = 0

    def matches(self, operation: str, path: str) -> bool:
        """Return whether an operation on a path goes wrong."""
        return (operation in self.operations or "*" in self.operations) and fnmatchcase(path, self.paths)


def write_rules(file: Path, rules: Iterable[Rule]) -> None:
    """Put ``rules`` in the place of those in ``file``, all at once."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps([asdict(rule) for rule in rules]))
    fresh.replace(file)


class RulesFile:
    """The rules as they are in the file. Thread-safe."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[tuple[int, int], Sequence[Rule]] | None = None

    def current(self) -> Sequence[Rule]:
        """Return the rules; none where there is no file."""
        try:
            status = os.stat(self._file)  # noqa: PTH116 - once per operation of the file system
        except FileNotFoundError:
            return ()
        version = (status.st_ino, status.st_mtime_ns)
        seen = self._seen
        if seen is None or seen[0] != version:
            fields = json.loads(self._file.read_text())
            rules = tuple(Rule(**{**one, "operations": tuple(one["operations"])}) for one in fields)
            seen = self._seen = version, rules
        return seen[1]

    def first_match(self, operation: str, path: str) -> Rule | None:
        """Return the first rule that an operation on a path falls under."""
        return next((rule for rule in self.current() if rule.matches(operation, path)), None)
