"""Documents with the results of one run, and the option ``--json`` that writes them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.reporting.machine import Machine, this_machine
from benchmarks.reporting.rows import Results

ROOT = Path(__file__).resolve().parents[2]
RESULTS_FOLDER = ROOT / "benchmarks" / "results"
"""The committed results."""
SCHEMA_VERSION = 1
"""Version of the rows. Raise it with every change of a row, and renew the committed results."""

R = TypeVar("R", bound=Results)


class UnreadableResultsError(Exception):
    """A file of results that this version of the benchmarks cannot read."""


class Document(BaseModel, Generic[R]):
    """Results with all facts that a reader needs to judge and to repeat them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    benchmark: str
    command: str
    date: datetime
    load_average_before: float
    """Processes that were ready to run in the minute before the start; a quiet machine has almost none."""
    machine: Machine
    parameters: dict[str, Any]
    results: R


class Run:
    """A run of a benchmark that has just begun.

    Args:
        arguments: the parsed arguments of the command line, with ``json`` among them.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path: Path | None = arguments.json
        self._parameters = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("json", "files", "folder")  # paths of this machine mean nothing elsewhere
        }
        self._date = datetime.now(UTC).replace(microsecond=0)
        self._load = os.getloadavg()[0]

    def write(self, results: Results) -> None:
        """Write the document if the command line names a file for it."""
        if self._path is None:
            return
        document = Document(
            benchmark=results.benchmark,
            command=shlex.join(["python", "-m", f"benchmarks.{results.benchmark}", *sys.argv[1:]]),
            date=self._date,
            load_average_before=self._load,
            machine=this_machine(),
            parameters=self._parameters,
            results=results,
        )
        self._path.write_text(document.model_dump_json(indent=1) + "\n")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that :class:`Run` reads."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


def read(path: Path, results: type[R]) -> Document[R]:
    """Read a document.

    Raises:
        UnreadableResultsError: the file is missing, is no JSON, or was written by another version of the benchmarks.
    """
    cure = f"renew it: python -m benchmarks.{results.benchmark} … --json {path}"
    try:
        content = json.loads(path.read_text())
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise UnreadableResultsError(
                f"{path}: schema_version is {version!r}, this version reads {SCHEMA_VERSION}; {cure}"
            )
        if content.get("benchmark") != results.benchmark:
            raise UnreadableResultsError(
                f"{path}: results of {content.get('benchmark')!r}, not of {results.benchmark!r}; {cure}"
            )
        return Document[results].model_validate(content)  # type: ignore[valid-type]
    except (OSError, ValueError, ValidationError) as error:
        raise UnreadableResultsError(f"{path}: {error}; {cure}") from error
