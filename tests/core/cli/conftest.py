"""Tiers with objects in temporary folders, and the command in this process and in one of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend, DiskOptions
from typer.testing import CliRunner

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.cli import app
from offload_core.cli.probes import sealed
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.disk.conftest import files_under, small_disk
from tests.backends.nfs.conftest import _server, credentials, s3_options, s3_server
from tests.support.paths import ROOT

__all__ = ["_server", "credentials", "s3_options", "s3_server", "small_disk"]

COMMAND = Path(sys.executable).with_name("offload-core")
FIRST, SECOND = "ab" * 32, "cd" * 32


@dataclass
class Ended:
    """The end of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Site:
    """A folder with a configuration, its tiers and, on the import path, a plugin for the type ``odd``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugins = folder / "site"
        self.install("odd", "tests.core.cli.odd_backend")
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.plugins), str(ROOT), *sys.path])}

    def install(self, name: str, module: str) -> None:
        """Declare a plugin as an installed distribution does."""
        info = self.plugins / f"{name}-2.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[offload_core]\n{name} = {module}\n")
        importlib.invalidate_caches()  # for invoke: a folder's time of change is too coarse for importlib.metadata

    def path(self, tier: str) -> Path:
        return self.folder / tier

    def configure(self, *tiers: dict[str, Any], **settings: object) -> str:
        """Write a configuration; a tier's folder is named after it, its type is ``disk`` where it has no other."""
        backends = [{"type": "disk", "path": str(self.path(tier["name"])), **tier} for tier in tiers]
        config = self.folder / "offload.json"
        config.write_text(json.dumps({"shutdown_timeout_seconds": 1, **settings, "backends": backends}))
        return str(config)

    def put(self, tier: str, key: ObjectKey, payload: bytes, *, age_seconds: float = 0) -> Path:
        """Store an object as an engine does; returns its file."""
        backend = DiskBackend(DiskOptions(path=self.path(tier)), BackendContext(tier, DaemonExecutor(1, tier)))

        async def store() -> None:
            await backend.open()
            await backend.store([key], [sealed(key, payload)])
            await backend.close()

        asyncio.run(store())
        (file,) = self.path(tier).rglob(f"{key.pack}/*/{key.chunk_hash.hex()}.kv")
        now = file.stat().st_mtime
        os.utime(file, (now - age_seconds, now - age_seconds))
        return file

    def files(self, tier: str) -> list[Path]:
        return files_under(self.path(tier))

    def gate(self) -> Path:
        fifo = self.folder / "gate"
        os.mkfifo(fifo)
        return fifo

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the console script."""
        return self.start_process(str(COMMAND), *arguments)

    def start_process(self, *command: str) -> subprocess.Popen[str]:
        """Start a program that finds the same packages."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )

    def run(self, *arguments: str) -> Ended:
        """Run the console script to its end."""
        return ended(self.start(*arguments))

    def invoke(self, *arguments: str) -> Ended:
        """Run the application in this process, which is quicker."""
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        return Ended(done.exit_code, done.stdout, done.stderr)


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=60)
    return Ended(process.returncode, out, err)


def key(number: int, namespace: str = FIRST, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey(namespace, pack, bytes([number]) * 32)


def words(value: object) -> str:
    """Name a test after a command's options or a tier's faults."""
    if isinstance(value, dict):
        return " ".join(f"{name} {what}" for name, what in value.items())
    return " ".join(value) if isinstance(value, list) else ""


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A background process of a shell ignores interrupts, and so would all its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.syspath_prepend(made.plugins)
    monkeypatch.setenv("COLUMNS", "200")  # for error messages, which typer folds
    return made
