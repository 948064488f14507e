"""Secrets among a backend's options, read only from the environment, since vLLM logs its whole configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from offload_core.api.options import BackendOptions
from offload_core.config.problems import written_key

VARIABLE_PREFIX = "OFFLOAD_CORE"


@dataclass(frozen=True)
class SecretField:
    """A field of a backend's options that holds a secret.

    Args:
        name: the field's name.
        key: the options model's key for it: the name, or an alias.
        kind: ``SecretStr`` or ``SecretBytes``; ``None`` if the secret is only a part of the value, since no environment
            variable can fill that.
    """

    name: str
    key: str
    kind: type[SecretStr] | type[SecretBytes] | None

    def wrap(self, value: str) -> SecretStr | SecretBytes:
        """Return ``value`` as the field's type, so that no print of the options' input shows it."""
        return SecretBytes(value.encode()) if self.kind is SecretBytes else SecretStr(value)


def secret_fields(options: type[BackendOptions]) -> list[SecretField]:
    """Return the fields of ``options`` that hold a secret, in their order."""
    found = []
    for name, field in options.model_fields.items():
        if not any(issubclass(kind, SecretStr | SecretBytes | Secret) for kind in _types_in(field.annotation, {})):
            continue
        many_names = not isinstance(field.validation_alias, str | None)
        kind = None if many_names else _plain_secret(field.annotation)
        found.append(SecretField(name, written_key(name, field), kind))
    return found


def variable_name(tier: str | None, field: str) -> str:
    """Return the environment variable of a tier's secret: upper case, with ``_`` for all but letters and digits.

    A tier that has no name yet stands as ``<TIER NAME>``.
    """
    in_capitals = [re.sub("[^A-Z0-9]", "_", part.upper()) for part in (tier or "", field)]
    return "_".join([VARIABLE_PREFIX, in_capitals[0] or "<TIER NAME>", in_capitals[1]])


def from_environment(
    fields: Sequence[SecretField], tier: str | None, environ: Mapping[str, str]
) -> dict[str, SecretStr | SecretBytes]:
    """Return the secrets that are set, by the options model's keys. An empty variable counts as not set."""
    if tier is None:
        return {}
    values = {field: environ.get(variable_name(tier, field.name), "") for field in fields}
    return {field.key: field.wrap(value) for field, value in values.items() if value}


def _plain_secret(annotation: Any) -> type[SecretStr] | type[SecretBytes] | None:
    """Return the secret's type if the field is a secret, or a secret or ``None``."""
    if get_origin(annotation) is Annotated:
        return _plain_secret(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [part for part in get_args(annotation) if part is not NoneType]
        return _plain_secret(others[0]) if len(others) == 1 else None
    if annotation is SecretStr:
        return SecretStr
    return SecretBytes if annotation is SecretBytes else None


def _types_in(annotation: Any, seen: dict[int, Any]) -> Iterator[type]:
    """Yield every class that a value of ``annotation`` may hold, through containers and models."""
    if id(annotation) in seen:
        return
    seen[id(annotation)] = annotation
    annotation = getattr(annotation, "__value__", annotation)  # a type alias
    origin = get_origin(annotation)
    for part in (*get_args(annotation), *([origin] if origin is not None else [])):
        yield from _types_in(part, seen)
    if origin is None and isinstance(annotation, type):
        yield annotation
        for part in _member_types(annotation):
            yield from _types_in(part, seen)


def _member_types(kind: type) -> Iterable[Any]:
    if issubclass(kind, BaseModel):
        return [field.annotation for field in kind.model_fields.values()]
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__total__") or hasattr(kind, "_fields"):  # or a dict or tuple
        return get_type_hints(kind).values()
    return []
