"""Pydantic's errors as lines for the operator: the path, the bad value, valid values, the cure.

A line shows a bad value only if it is a single value of a field that is not secret. A list or a mapping in a wrong
place may hold anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from offload_core.api.errors import closest, did_you_mean
from offload_core.api.options import DURATION_ERROR, SIZE_ERROR

M = TypeVar("M", bound=BaseModel)

MAX_PROBLEMS = 100
"""The most problems that one error lists."""
_MAX_SHOWN = 1000
"""The most characters of a bad value, and of a message about it."""


@dataclass(frozen=True)
class Secrets:
    """Secrets that no message may show.

    Args:
        variables: for each secret key, the environment variable that holds it.
        values: the secrets, which are removed from a plugin's own messages.
        reported: secret keys whose absence is already reported.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    values: Collection[str] = field(default=(), repr=False)
    reported: Collection[str] = ()

    def hide(self, text: str) -> str:
        """Return ``text`` without the secrets, plain or with special characters escaped by ``repr``."""
        forms = {form for value in self.values for form in (value, repr(value)[1:-1])}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "**********")
        return text


def validate(
    model: type[M],
    raw: Mapping[str, Any],
    prefix: str,
    valid_keys: Iterable[str] | None = None,
    secrets: Secrets | None = None,
) -> tuple[M | None, list[str]]:
    """Return ``raw`` as a ``model``, or ``None`` with one line per problem. Each line has its dotted path."""
    try:
        return model.model_validate(raw), []
    except ValidationError as error:
        keys = sorted(valid_keys if valid_keys is not None else model.model_fields)
        details = error.errors(include_url=False)
    left = len(details) - MAX_PROBLEMS
    # Outside the except clause: the traceback of a later error must not show pydantic's text with its inputs.
    secrets = secrets or Secrets()
    problems = [
        _describe(dict(detail), prefix, keys if len(detail["loc"]) == 1 else _keys_at(detail["loc"], model), secrets)
        for detail in details[:MAX_PROBLEMS]
        if not (detail["type"] == "missing" and detail["loc"][0] in secrets.reported)
    ]
    if left > 0:
        problems.append(f"{prefix.rstrip('.') or 'other keys'}: {left} more problems")
    return None, problems


def _keys_at(loc: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Return the keys of the model inside ``model`` and its lists in which ``loc`` ends; an empty list if none does."""
    place: Any = model
    for part in loc[:-1]:
        if isinstance(part, int):
            place = next(iter(get_args(place)), None)
        else:
            fields = getattr(place, "model_fields", {})
            place = fields[part].annotation if part in fields else None
    return sorted(getattr(place, "model_fields", ()))


def _describe(detail: dict[str, Any], prefix: str, valid_keys: Sequence[str], secrets: Secrets) -> str:
    loc = detail["loc"]
    path = _shortened((prefix + ".".join(str(part) for part in loc)).rstrip("."))
    kind = detail["type"]
    variable = secrets.variables.get(loc[0]) if loc and isinstance(loc[0], str) else None
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_hint(str(loc[-1]), valid_keys, secrets) if valid_keys else '; remove it'}"
    if kind == "invalid_key":
        return f"{path}: a key must be text; put it in quotes"
    if kind == "missing":
        return f"{path}: missing; set the environment variable {variable}" if variable else f"{path}: missing; add it"
    message = _shortened(secrets.hide(detail["msg"].removeprefix("Value error, ")))
    if variable:
        return f"{path}: the value of the environment variable {variable} is not valid: {message}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: {kind_of(detail['input'])} is not valid: it must hold keys and values"
    if path == "backends":
        return f"{path}: {kind_of(detail['input'])} is not valid: {message}"
    if not loc:  # a validator of the whole entry
        return f"{path}: {message}"
    value = _shortened(secrets.hide(shown(detail["input"])))
    if kind in (SIZE_ERROR, DURATION_ERROR):
        return f"{path}: {value} is {message}"
    return f"{path}: {value} is not valid: {message}"


def _hint(key: str, valid_keys: Sequence[str], secrets: Secrets) -> str:
    close = closest(key, [*valid_keys, *secrets.variables])
    if close is not None and close in secrets.variables:
        hint = f" (did you mean the secret {close!r}? set the environment variable {secrets.variables[close]})"
    else:
        hint = did_you_mean(key, valid_keys)
    return f"{hint}; valid keys: {', '.join(valid_keys)}"


def written_key(name: str, field: FieldInfo) -> str:
    """Return the key that operators write for a field: its alias if it has one."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def shown(value: object) -> str:
    """Return a single value as text, but only the kind of a collection."""
    if isinstance(value, Mapping) or (isinstance(value, Collection) and not isinstance(value, str | bytes)):
        return kind_of(value)
    try:
        return repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"


def _shortened(text: str) -> str:
    """Return ``text`` with its middle left out if it is long. Hide secrets first, since a part of one is left."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[: _MAX_SHOWN // 2]} … ({len(text)} characters) … {text[-_MAX_SHOWN // 4 :]}"


def kind_of(value: object) -> str:
    """Return the kind of a value in an operator's words, without the value."""
    if value is None:
        return "nothing"
    kinds: list[tuple[type | tuple[type, ...], str]] = [
        (bool, "a truth value"),
        ((int, float), "a number"),
        (str, "text"),
        (Mapping, "a mapping"),
        ((list, tuple), "a list"),
    ]
    return next((word for kind, word in kinds if isinstance(value, kind)), type(value).__name__)
