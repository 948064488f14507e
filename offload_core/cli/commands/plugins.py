"""``offload-core plugins``: the installed plugins and their failures."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson
from offload_core.cli.output import note, print_json, print_table
from offload_core.cli.session import EXIT_TROUBLE
from offload_core.plugins.registry import PluginReport, load_plugins


@app.command()
def plugins(
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with code 1 if a plugin failed")] = False,
) -> None:
    """List the installed plugins: their distributions, their backend types, and the reasons of failures.

    The column "missing" names the modules that a backend type still needs, with the commands that install them.

    A plugin that failed never stops the others. The exit code is therefore 0, unless you give `--strict`.

    Example: `offload-core plugins --strict`
    """
    found = [_document(report) for report in load_plugins().reports]
    failed = [plugin for plugin in found if plugin["error"]]
    if as_json:
        print_json({"plugins": found})
    else:
        columns = {"name": "plugin", "distribution": "distribution", "version": "version", "api_version": "API"}
        columns |= {"backend_types": "backend types", "hooks": "hooks", "error": "error"}
        if any(plugin["missing"] for plugin in found):
            columns["missing"] = "missing"
        print_table(list(columns.values()), ([_cell(plugin[key]) for key in columns] for plugin in found))
    if failed:
        note(f"{len(failed)} of {len(found)} plugins failed; an engine that needs one of them does not start")
    if failed and strict:
        raise typer.Exit(EXIT_TROUBLE)


def _document(report: PluginReport) -> dict[str, Any]:
    fields = dataclasses.asdict(report)
    distribution, _, version = fields["distribution"].partition(" ")
    return {
        "name": fields["name"],
        "distribution": distribution,
        "version": fields.get("version", version),
        "module": fields.get("module"),
        "api_version": fields.get("api_version"),
        "backend_types": list(fields["backend_types"]),
        "hooks": list(fields.get("hooks", ())),
        "error": fields["error"],
        "missing": list(fields["missing"]),
    }


def _cell(value: object) -> str:
    if value is None or value == []:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
