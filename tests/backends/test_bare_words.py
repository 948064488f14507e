"""The words ``on`` and ``off`` of the bundled backends' options, written bare in YAML, which reads them as booleans."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

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
