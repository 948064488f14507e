"""Plugins found through real entry points of real distributions, broken in every way that one can be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from textwrap import dedent

import pytest

from offload_core.errors import PluginError
from offload_core.plugins import PluginRegistry, load_plugins

PRELUDE = """
from offload_core.backend import Backend, BackendOptions, BackendType
from offload_core.hookspecs import hookimpl

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
    """A folder like site-packages, with distributions that declare entry points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, source: str, *, name: str | None = None, value: str | None = None) -> None:
        """Install a distribution with one module and one entry point, both named after it."""
        module = distribution.replace("-", "_")
        (self.folder / f"{module}.py").write_text(PRELUDE + dedent(source))
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[offload_core]\n{name or distribution} = {value or module}\n")

    def load(self) -> PluginRegistry:
        points: list[EntryPoint] = []
        for distribution in distributions(path=[str(self.folder)]):
            points += distribution.entry_points
        return load_plugins(points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Site(tmp_path)
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]


def test_offload_register_backends(site: Site) -> None:
    site.install("good", WORKS.format(name="good-type"))
    registry = site.load()
    assert registry.backend_type("good-type").backend.__name__ == "Medium"
    (report,) = registry.reports
    assert (report.name, report.distribution, report.backend_types) == ("good", "good 1.0", ("good-type",))
    assert report.error is None


BROKEN = {
    "import error": ("import a_module_that_does_not_exist", "ModuleNotFoundError: No module named"),
    "error at import": ("raise RuntimeError('no device')", "RuntimeError: no device"),
    "exit at import": ("raise SystemExit('wrong version')", "SystemExit: wrong version"),
    "syntax error": ("def (", "SyntaxError"),
    "error in the hook": (
        "@hookimpl\ndef offload_register_backends():\n    raise OSError('no driver')",
        "OSError: no driver",
    ),
    "unmarked hook": ("def offload_register_backends():\n    return []", "has no hook; mark its functions with"),
    "misspelt hook": ("@hookimpl\ndef offload_register_backend():\n    return []", "offload_register_backend"),
    "unknown argument": ("@hookimpl\ndef offload_register_backends(engine):\n    return []", "engine"),
    "async hook": (
        "@hookimpl\nasync def offload_register_backends():\n    return []",
        "PluginError: hook offload_register_backends is an async def",
    ),
    "not a backend type": (
        "@hookimpl\ndef offload_register_backends():\n    return [Medium]",
        "it must return BackendType objects",
    ),
    "not a list": (
        "@hookimpl\ndef offload_register_backends():\n    return BackendType('x', Medium, Options)",
        "TypeError",
    ),
    "not a backend class": (
        "@hookimpl\ndef offload_register_backends():\n    return [BackendType('wrong', dict, Options)]",
        "backend type 'wrong': <class 'dict'> is not a subclass of Backend",
    ),
    "an object for a class": (
        "@hookimpl\ndef offload_register_backends():\n    return [BackendType('wrong', 'Medium', Options)]",
        "backend type 'wrong': 'Medium' is not a subclass of Backend",
    ),
    "not an options class": (
        "@hookimpl\ndef offload_register_backends():\n    return [BackendType('wrong', Medium, dict)]",
        "backend type 'wrong': <class 'dict'> is not a subclass of BackendOptions",
    ),
    "the same type twice": (
        "@hookimpl\ndef offload_register_backends():\n    return [BackendType('twice', Medium, Options)] * 2",
        "the backend type 'twice' is provided by",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_stops_no_other_and_is_raised_only_when_needed(site: Site, source: str, message: str) -> None:
    # One plugin that is loaded before the broken one and one after it.
    site.install("a-good", WORKS.format(name="first"))
    site.install("m-broken", source)
    site.install("z-good", WORKS.format(name="last"))
    registry = site.load()
    assert set(registry.backend_types) == {"first", "last"}
    assert registry.backend_type("first").name == "first"
    assert registry.backend_type("last").name == "last"
    errors = {report.name: report.error for report in registry.reports}
    assert errors["a-good"] is None
    assert errors["z-good"] is None
    assert errors["m-broken"] is not None
    assert message in errors["m-broken"]
    with pytest.raises(PluginError) as caught:
        registry.backend_type("of-the-broken-one")
    for part in (
        "'of-the-broken-one'",
        "known types: first, last",
        "plugin 'm-broken' of m-broken 1.0 failed",
        message,
    ):
        assert part in str(caught.value)


def test_an_entry_point_that_names_an_object_is_an_error(site: Site) -> None:
    site.install("object", WORKS.format(name="t"), value="object:Medium")
    (report,) = site.load().reports
    assert "it must name a module that holds hook functions" in str(report.error)


def test_one_entry_point_name_in_two_distributions_is_refused_for_both(site: Site) -> None:
    site.install("one", WORKS.format(name="t1"), name="same")
    site.install("two", WORKS.format(name="t2"), name="same")
    site.install("other", WORKS.format(name="t3"))
    registry = site.load()
    assert set(registry.backend_types) == {"t3"}
    with pytest.raises(PluginError, match="the entry point name 'same' is used by one and two; uninstall one of them"):
        registry.backend_type("t1")


def test_one_backend_type_in_two_distributions_is_refused_for_both(site: Site) -> None:
    site.install("one", WORKS.format(name="same"))
    site.install("two", WORKS.format(name="same"))
    site.install("other", WORKS.format(name="t3"))
    registry = site.load()
    assert set(registry.backend_types) == {"t3"}
    with pytest.raises(
        PluginError, match=r"the backend type 'same' is provided by one 1\.0 and two 1\.0; uninstall one of them"
    ):
        registry.backend_type("same")


def test_without_any_plugin_the_error_says_how_to_get_one() -> None:
    with pytest.raises(PluginError, match="known types: none; install the package that provides it"):
        load_plugins([]).backend_type("disk")


def test_the_installed_distribution_provides_the_disk_backend() -> None:
    registry = load_plugins()
    assert registry.backend_type("disk").name == "disk"
    (report,) = [report for report in registry.reports if "disk" in report.backend_types]
    assert report.name == "disk"
    assert report.distribution.startswith("offload-core ")
