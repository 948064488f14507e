"""The words ``on`` and ``off`` of the bundled backends' options, written bare in YAML, which reads them as booleans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
from pydantic import ConfigDict, Field, ValidationError

from offload_core.api.options import BackendOptions
from offload_core.config.loading import load_config
from offload_core.plugins.registry import load_plugins

CASES = [
    (registered.name, key, word)
    for registered in load_plugins().backend_types.values()
    for key, field in registered.options.model_fields.items()
    for word in ("on", "off")
    if word in get_args(field.annotation)
]
REQUIRED = {"cpu": "capacity: 1GiB", "disk": "path: ./kv"}
"""The keys without a default of each type in ``CASES``."""


def test_the_options_are_found() -> None:
    assert {("cpu", "pin"), ("disk", "direct_io")} <= {(name, key) for name, key, _ in CASES}


@pytest.mark.parametrize(("backend_type", "key", "word"), CASES)
def test_a_bare_word_of_yaml_is_the_word(
    backend_type: str, key: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "offload.yaml"
    file.write_text(f"backends:\n  - {{name: t, type: {backend_type}, {REQUIRED[backend_type]}, {key}: {word}}}\n")
    (tier,) = load_config({"config_file": str(file)}).tiers
    assert getattr(tier.options, key) == word


class WordOptions(BackendOptions):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    maybe: Literal["on", "off"] | None = Field(None, description="a word or nothing")
    named: Annotated[Literal["on", "off"], "a name"] | int = Field(7, description="a word or a number")
    level: Literal["on", "off", 3] = Field("on", description="a word or a number")
    debug: Literal["on"] = Field("on", description="one word")
    flag: bool | Literal["on"] = Field(False, description="a boolean, or a word")
    hook: Callable[[int], str] = Field(str, description="no word")


@pytest.mark.parametrize("option", ["maybe", "named", "level"])
def test_a_boolean_is_a_word_of_any_literal(option: str) -> None:
    read = [WordOptions.model_validate({option: given}) for given in (True, False)]
    assert [getattr(options, option) for options in read] == ["on", "off"]


def test_a_boolean_that_is_no_word_of_the_option_stays_one_or_is_refused() -> None:
    assert WordOptions.model_validate({"debug": True}).debug == "on"
    assert WordOptions.model_validate({"flag": True}).flag is True
    with pytest.raises(ValidationError, match="debug"):
        WordOptions.model_validate({"debug": False})
    with pytest.raises(ValidationError, match="hook"):
        WordOptions.model_validate({"hook": True})


def test_the_schema_has_the_booleans_that_the_options_take() -> None:
    class Plain(WordOptions):
        hook: int = Field(0, description="a function has no schema")  # type: ignore[assignment]

    schema = Plain.model_json_schema()["properties"]
    assert schema["maybe"]["anyOf"] == [{"enum": ["on", "off", True, False]}, {"type": "null"}]
    assert schema["named"]["anyOf"] == [{"enum": ["on", "off", True, False]}, {"type": "integer"}]
    assert schema["level"]["enum"] == ["on", "off", 3, True, False]
    assert schema["debug"]["enum"] == ["on", True]
    assert schema["flag"]["anyOf"] == [{"type": "boolean"}, {"const": "on", "type": "string"}]
