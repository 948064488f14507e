"""All that plugins build on: entry points, hooks, classes with their methods and fields, and the contract's tests."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.golden import subject
from tests.golden.masks import ROOT

BUNDLED = ("cpu", "disk", "nfs")


def surface(folder: Path) -> dict[str, Any]:
    """Return the whole surface."""
    contract = subject.BackendContract
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reports = {report.name: report for report in subject.load_plugins().reports if report.name in BUNDLED}
    return {
        "distribution": project["name"],
        "console scripts": sorted(project["scripts"]),
        "entry points": {group: sorted(points) for group, points in project["entry-points"].items()},
        "extras": sorted(project["optional-dependencies"]),
        "plugins": {
            name: {
                "distribution": report.distribution,
                "OFFLOAD_API_VERSION": report.api_version,
                "hooks": list(report.hooks),
                "backend types": list(report.backend_types),
                "capabilities": [subject.capabilities({"backends": [tier]}) for tier in _tiers(name, folder)],
                "error": report.error,
            }
            for name, report in reports.items()
        },
        "API versions": [subject.OLDEST_API_VERSION, subject.API_VERSION],
        "hooks": {
            name: str(inspect.signature(hook)).replace("'", "")
            for name, hook in vars(subject.HookSpecs).items()
            if name.startswith("offload_")
        },
        "contract": {
            "clauses": sorted({int(name[6:8]) for name in subject.contract_tests()}),
            "tests": sorted(name for name in dir(contract) if name.startswith("test_")),
            "may be overridden": sorted(name for name in dir(contract) if not name.startswith(("_", "test_"))),
        },
        "classes": {kind.__name__: _class(kind) for kind in sorted(subject.PUBLIC_CLASSES, key=lambda k: k.__name__)},
        "functions": {
            "check_folder": _signature(subject.check_folder),
            "check_ownership": _signature(subject.check_ownership),
            "preallocate": _signature(subject.preallocate),
        },
    }


def _tiers(name: str, folder: Path) -> list[dict[str, str]]:
    """Return tiers of a bundled type, without a capacity and with one."""
    tier = {"name": "golden", "type": name}
    if name == "cpu":
        return [{**tier, "capacity": "1MiB"}]
    place = {"disk": {"path": str(folder / "objects")}, "nfs": {"url": "memory://bucket/golden"}}[name]
    return [{**tier, **place}, {**tier, **place, "capacity": "1MiB"}]


def _class(kind: type) -> dict[str, Any]:
    described: dict[str, Any] = {"bases": [base.__name__ for base in kind.__bases__]}
    if issubclass(kind, enum.Enum):
        return {**described, "values": {member.name: member.value for member in kind}}
    if dataclasses.is_dataclass(kind):
        described["fields"] = {field.name: _field(field) for field in dataclasses.fields(kind)}
    elif issubclass(kind, tuple):
        fields = inspect.get_annotations(kind).items()
        described["fields"] = {name: getattr(annotation, "__forward_arg__", annotation) for name, annotation in fields}
    elif issubclass(kind, BaseModel):
        described["model_config"] = dict(kind.model_config)
    elif "__init__" in vars(kind):
        described["constructor"] = _signature(kind)
    described["abstract"] = sorted(getattr(kind, "__abstractmethods__", ()))
    described["methods"] = {
        name: _method(value)
        for name, value in sorted(vars(kind).items())
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    return {key: value for key, value in described.items() if value}


def _field(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    return f"{field.type}{default}"


def _method(value: Any) -> str:
    if isinstance(value, property):
        return f"property -> {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
    asynchronous = inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)
    return f"{'async ' if asynchronous else ''}{_signature(value)}"


def _signature(value: Any) -> str:
    return re.sub(r"'", "", str(inspect.signature(value)))
