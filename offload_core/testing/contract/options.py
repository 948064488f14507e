"""Clause about the options model: C15."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError

from offload_core.api.backend import BackendType
from offload_core.testing.contract.checks import expect

_SECRET = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|token|credentials?|(api|access|account|secret|private|signing)_key)$"
)


class OptionsContract:
    """An operator's options are checked, described and, if secret, hidden."""

    backend_type: ClassVar[BackendType]

    def test_c15_an_unknown_key_is_refused(self, options: Mapping[str, Any]) -> None:
        try:
            self.backend_type.options.model_validate({**options, "no_such_option": 1})
        except ValidationError as error:
            problems = {(problem["loc"], problem["type"]) for problem in error.errors()}
            expect(
                problems == {(("no_such_option",), "extra_forbidden")},
                f"C15: the key no_such_option beside {dict(options)} led to other problems: {error}",
            )
        else:
            raise AssertionError(
                f"C15: {self.backend_type.options.__name__} took the key no_such_option = 1; "
                "leave extra='forbid' of BackendOptions as it is"
            )
        for model in _models(self.backend_type.options):
            extra = model.model_config.get("extra")
            expect(extra == "forbid", f"C15: {model.__name__} has extra={extra!r}; it must be 'forbid'")

    def test_c15_every_option_is_described(self) -> None:
        bare = [f"{model.__name__}.{name}" for model, name, field in _fields(self.backend_type.options)
                if not (field.description or "").strip()]  # fmt: skip
        expect(not bare, f"C15: options without a description: {', '.join(bare)}; write Field(description=…)")

    def test_c15_secrets_are_hidden(self) -> None:
        shown = [
            f"{model.__name__}.{name}"
            for model, name, field in _fields(self.backend_type.options)
            if _SECRET.search(name.lower()) and {str, bytes} & set(_types(field.annotation))
        ]
        expect(not shown, f"C15: options that hold secrets and would be printed: {', '.join(shown)}; use SecretStr")

    def test_c15_options_have_a_json_schema(self) -> None:
        model = self.backend_type.options
        try:
            schema = model.model_json_schema(by_alias=False)
        except Exception as error:
            raise AssertionError(
                f"C15: {model.__name__} has no JSON schema: {type(error).__name__}: {error}; "
                "use types that pydantic knows, or say WithJsonSchema"
            ) from error
        missing = model.model_fields.keys() - schema.get("properties", {}).keys()
        expect(not missing, f"C15: the JSON schema of {model.__name__} lacks {', '.join(sorted(missing))}")


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types inside an annotation."""
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _types(argument)


def _models(model: type[BaseModel], seen: frozenset[type[BaseModel]] = frozenset()) -> Iterator[type[BaseModel]]:
    """Yield an options model and the models inside it."""
    if model in seen:
        return
    yield model
    for field in model.model_fields.values():
        for inner in _types(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _models(inner, seen | {model})


def _fields(options: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str, Any]]:
    for model in _models(options):
        for name, field in model.model_fields.items():
            yield model, name, field
