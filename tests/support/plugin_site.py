"""A folder like site-packages with distributions that tests write into it."""

from __future__ import annotations

from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from textwrap import dedent

from offload_core.plugins.registry import PluginRegistry, load_plugins

PRELUDE = """
from offload_core.api.backend import Backend, BackendOptions, BackendType
from offload_core.api.hooks import hookimpl

OFFLOAD_API_VERSION = 1

class Options(BackendOptions):
    pass

class Medium(Backend):
    capabilities = contains = load_into = store = delete = None
"""

WORKS = """
@hookimpl
def offload_register_backends():
    return [BackendType({name!r}, Medium, Options)]
"""


class Site:
    def __init__(self, *folders: Path) -> None:
        self.folders = folders

    def install(
        self, distribution: str, source: str, *, name: str | None = None, value: str | None = None, folder: int = 0
    ) -> None:
        """Install a distribution with one module and one entry point, both named after it."""
        module = distribution.replace("-", "_")
        (self.folders[folder] / f"{module}.py").write_text(PRELUDE + dedent(source))
        self.declare(distribution, f"{name or distribution} = {value or module}", folder=folder)

    def declare(self, distribution: str, *entry_points: str, folder: int = 0) -> None:
        """Install a distribution with these entry points and nothing else."""
        info = self.folders[folder] / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[offload_core]", *entry_points, ""]))

    def load(self) -> PluginRegistry:
        points: list[EntryPoint] = []
        for distribution in distributions(path=[str(folder) for folder in self.folders]):
            points += distribution.entry_points
        return load_plugins(points)
