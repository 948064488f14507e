"""The generated tables of the documents: configuration keys, metrics, and options of the command line.

    python -m tests.support.reference_tables

writes them between their markers in ``docs/``. ``make docs`` runs it, and a test compares the documents with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from offload_core.cli import app
from offload_core.config.connectors import ChoiceLimits, ConnectorEntry
from offload_core.config.model import BackendConfig, OffloadSettings
from offload_core.plugins.registry import load_plugins
from offload_core.runtime.metrics import CONNECTOR_COUNTERS, CONNECTOR_GAUGES, COUNTERS, GAUGES, HISTOGRAMS
from tests.support.paths import ROOT

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CONNECTORS = "vllm:weighted_multi_"
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


def documents() -> list[Path]:
    """Return the documents that have generated tables."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if _BLOCK.search(path.read_text())]


def with_tables(text: str) -> str:
    """Return a document's text with its tables written anew."""
    tables = reference_tables()
    return _BLOCK.sub(lambda found: f"{found[1]}\n{tables[found['name']]}\n\n{found[3]}", text)


def reference_tables() -> dict[str, str]:
    """Return every table as Markdown, by the name in its marker."""
    types = load_plugins().backend_types
    return {
        "engine keys": _keys(OffloadSettings),
        "backend keys": _keys(BackendConfig, unset="the engine's"),
        **{
            f"{name} keys": _keys(types[name].options) for name in ("cpu", "disk", "lmcache", "mooncake", "nfs", "nixl")
        },
        "connector keys": _keys(ConnectorEntry, unset="its class"),
        "choice keys": _keys(ChoiceLimits),
        "counters": _table(("counter", "meaning"), _metrics(COUNTERS, "_total")),
        "gauges": _table(("gauge", "meaning"), _metrics(GAUGES, "")),
        "histograms": _table(("histogram", "meaning"), _metrics(HISTOGRAMS, "")),
        "connector counters": _table(("counter", "meaning"), _metrics(CONNECTOR_COUNTERS, "_total", _CONNECTORS)),
        "connector gauges": _table(("gauge", "meaning"), _metrics(CONNECTOR_GAUGES, "", _CONNECTORS)),
        "commands": "\n\n".join(_commands()),
    }


def _keys(model: type[BaseModel], unset: str = "none") -> str:
    rows = []
    for key, field in model.model_fields.items():
        inherits = unset != "none" and key in OffloadSettings.model_fields
        rows.append((f"`{key}`", _default(key, field, unset if inherits else "none"), field.description or ""))
    return _table(("key", "default", "meaning"), rows)


def _default(key: str, field: FieldInfo, unset: str) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required() or value is PydanticUndefined:
        return "required"
    if value is None or value in ([], {}):
        return unset
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and (key.endswith("_bytes") or key in ("part_size", "capacity")):
        unit, size = next((unit, size) for unit, size in _UNITS if value % size == 0)
        return f"`{value // size}{unit}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _metrics(
    meanings: Mapping[str, str], suffix: str, prefix: str = "vllm:hybrid_offload_"
) -> Iterator[tuple[str, str]]:
    for name, meaning in meanings.items():
        yield f"`{prefix}{name}{suffix}`", meaning


def _commands() -> Iterator[str]:
    group: Any = typer.main.get_command(app)  # typer has its own copy of click, which has no public types
    for name, command in sorted(group.commands.items()):
        rows = [_parameter(parameter) for parameter in command.params]
        help_text = " ".join((command.help or "").split("\n\n")[0].split())
        section = f"### offload-core {name}\n\n{help_text}"
        yield f"{section}\n\n{_table(('option', 'default', 'meaning'), rows)}" if rows else section


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "option":
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
    else:
        names = f"`{(parameter.metavar or parameter.name).upper()}`"
    default = "" if parameter.default in (None, False, ()) else f"`{parameter.default}`"
    return names, "required" if parameter.required else default, " ".join((parameter.help or "").split())


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [tuple(head), *rows]
    texts = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    return "\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]])


def main() -> None:
    """Write the tables into the documents."""
    for path in documents():
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
