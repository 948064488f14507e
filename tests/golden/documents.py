"""Every golden file by its name, and the code that produces its content today."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden import command_line, configurations, engine, objects, surface
from tests.golden.masks import as_json

Producer = Callable[[Path], Any]
"""Takes an empty folder; returns bytes, a text, or a document that is written as JSON."""

OBJECTS: dict[str, Producer] = {
    objects.golden_object(codec).name: objects.writer(codec) for codec in ("none", "zstd", "zstd-planes")
}
"""Objects of the present format version. Which bytes zstd makes may depend on its version."""

DOCUMENTS: dict[str, Producer] = {
    "names-on-media.json": objects.names_on_media,
    "fingerprints.json": objects.fingerprints,
    "payloads.json": objects.payloads,
    "configuration-schema.json": configurations.schema,
    "configurations.json": configurations.outcomes,
    "secrets.json": configurations.secrets,
    "metrics.json": engine.metrics,
    "engine-identity.json": engine.identity,
    "request-options.json": engine.request_options,
    "plugin-surface.json": surface.surface,
    "cli-parameters.json": command_line.parameters,
    **{f"cli-{name}.txt": command_line.transcript(name) for name in command_line.CASES},
}
for geometry in command_line.GEOMETRIES:
    DOCUMENTS[f"plan-{geometry.stem}.json"] = command_line.plan_json(geometry)
    DOCUMENTS[f"plan-{geometry.stem}.txt"] = command_line.plan_text(geometry)
    DOCUMENTS[f"chunk-keys-{geometry.stem}.json"] = objects.chunk_keys(geometry)


def produced(producer: Producer, folder: Path) -> bytes:
    """Return what a golden file would hold if it were written now."""
    content = producer(folder)
    if isinstance(content, bytes):
        return content
    return (content if isinstance(content, str) else as_json(content)).encode()
