"""The form of a backend's answer: one result of the right type per key (clause C2)."""

from __future__ import annotations

import enum
from collections.abc import Mapping


def answer_problem(call: str, answer: object, kind: type, *, or_none: bool = False) -> str | None:
    """Return the reason why an answer is no sequence of results, or ``None``. The number of results is not checked.

    Args:
        call: the method of the backend, for the message.
        answer: its answer.
        kind: the type of each result. For ``bool``, any value will do, because only its truth counts.
        or_none: a result may also be ``None``.
    """
    required = f"clause C2 requires a {kind.__name__} per key"
    if isinstance(answer, Mapping | str | bytes) or not (hasattr(answer, "__len__") and hasattr(answer, "__iter__")):
        return f"{call} returned {answer!r:.80}; {required}, in a list"
    if issubclass(kind, enum.Enum):
        required += f": {', '.join(one.name for one in kind)}{' or None' if or_none else ''}"
    if kind is not bool:
        for result in answer:
            if not (isinstance(result, kind) or (or_none and result is None)):
                return f"{call} returned {result!r:.80}; {required}"
    return None
