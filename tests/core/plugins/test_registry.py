"""Plugins found through real entry points of real distributions, broken in every way that one can be."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from offload_core import __version__
from offload_core.api import hooks as hookspecs
from offload_core.api.errors import ConfigError, PluginError
from offload_core.config.loading import load_config
from offload_core.plugins.registry import PluginReport, load_plugins
from tests.support.plugin_site import WORKS, Site


def test_offload_register_backends(site: Site) -> None:
    site.install("good", WORKS.format(name="good-type"))
    registry = site.load()
    assert registry.backend_type("good-type").backend.__name__ == "Medium"
    assert registry.reports == (
        PluginReport(
            name="good",
            distribution="good",
            version="1.0",
            module="good",
            api_version=1,
            hooks=("offload_register_backends",),
            backend_types=("good-type",),
            error=None,
        ),
    )


def _hook(name: str, arguments: str = "", body: str = "return []", marker: str = "@hookimpl", prefix: str = "") -> str:
    return f"{marker}\n{prefix}def {name}({arguments}):\n    {body}"


REGISTER, WRAP, OBSERVE = "offload_register_backends", "offload_wrap_backend", "offload_observe"
CORE = f"offload-core {__version__} serves API version 1"

BROKEN = {
    "missing dependency": (
        "import a_package_that_is_missing.part",
        "ModuleNotFoundError: No module named 'a_package_that_is_missing'; m-broken 1.0 needs the package "
        "'a_package_that_is_missing', which is missing: pip install a_package_that_is_missing",
    ),
    "missing module of its own": (
        "import m_broken.part",
        "'m_broken' is not a package; the module belongs to m-broken 1.0 itself: reinstall it",
    ),
    "missing module of the core": (
        "import offload_core.of_the_future",
        f"m-broken 1.0 was written for another version than offload-core {__version__}: upgrade offload-core or "
        "m-broken",
    ),
    "missing name of the core": (
        "from offload_core.api.backend import OfTheFuture",
        f"m-broken 1.0 was written for another version than offload-core {__version__}: upgrade offload-core or "
        "m-broken",
    ),
    "import error": ("raise ImportError('libfabric.so: no such file')", "ImportError: libfabric.so: no such file"),
    "error at import": ("raise RuntimeError('no device')", "RuntimeError: no device"),
    "exit at import": ("raise SystemExit('wrong version')", "SystemExit: wrong version"),
    "syntax error": ("def (", "SyntaxError: invalid syntax (m_broken.py, line"),
    "no API version": (
        f"del OFFLOAD_API_VERSION\n{_hook(REGISTER)}",
        f"module m_broken of m-broken 1.0 states no OFFLOAD_API_VERSION and {CORE}; add the line "
        "OFFLOAD_API_VERSION = 1 to it, or upgrade m-broken",
    ),
    "API version as text": (
        f"OFFLOAD_API_VERSION = '1'\n{_hook(REGISTER)}",
        "OFFLOAD_API_VERSION of module m_broken is '1'; it must be a whole number, such as 1",
    ),
    "API version as a bool": (
        f"OFFLOAD_API_VERSION = True\n{_hook(REGISTER)}",
        "OFFLOAD_API_VERSION of module m_broken is True; it must be a whole number",
    ),
    "older API": (
        f"OFFLOAD_API_VERSION = 0\n{_hook(REGISTER)}",
        f"m-broken 1.0 is written for API version 0 and {CORE}; pip install --upgrade m-broken",
    ),
    "newer API": (
        f"OFFLOAD_API_VERSION = 2\n{_hook('offload_of_the_future')}",  # the version is looked at before the hooks
        f"m-broken 1.0 is written for API version 2 and {CORE}; pip install --upgrade offload-core",
    ),
    "error in the hook": (_hook(REGISTER, body="raise OSError('no driver')"), "OSError: no driver"),
    "exit in the hook": (_hook(REGISTER, body="raise SystemExit(3)"), "SystemExit: 3"),
    "no hook": ("", "module m_broken has no hook; write @hookimpl above its hook functions"),
    "unmarked hook": (
        f"{_hook(REGISTER)}\n{_hook(WRAP, 'backend, tier', marker='')}",
        "offload_wrap_backend has the name of a hook, but no mark; write @hookimpl above it",
    ),
    "misspelt hook": (
        _hook("offload_wrap_backends", "backend, tier"),
        "there is no hook offload_wrap_backends (did you mean 'offload_wrap_backend'?); the hooks are "
        "offload_register_backends, offload_wrap_backend, offload_observe",
    ),
    "misspelt specname": (
        _hook("register", marker="@hookimpl(specname='offload_register_backend')"),
        "there is no hook offload_register_backend (did you mean 'offload_register_backends'?)",
    ),
    "two functions for a hook": (
        _hook(OBSERVE, "event") + "\n" + _hook("too", "event", marker="@hookimpl(specname='offload_observe')"),
        "hook offload_observe is implemented twice",
    ),
    "unknown argument": (_hook(REGISTER, "engine"), "Argument(s) {'engine'} are declared in the hookimpl but can not"),
    "async hook": (_hook(REGISTER, prefix="async "), "hook offload_register_backends is an async def"),
    "async hook with options": (
        _hook(OBSERVE, "event", marker="@hookimpl(trylast=True)", prefix="async "),
        "hook offload_observe is an async def; hooks are plain functions",
    ),
    "async wrapper": (
        _hook(WRAP, "backend", "yield", marker="@hookimpl(wrapper=True)", prefix="async "),
        "hook offload_wrap_backend is an async def",
    ),
    "async generator": (_hook(OBSERVE, "event", "yield", prefix="async "), "hook offload_observe is an async def"),
    "generator": (_hook(OBSERVE, "event", "yield"), "hook offload_observe is a generator or a wrapper of hooks"),
    "wrapper of hooks": (
        _hook(OBSERVE, "event", "return (yield)", marker="@hookimpl(wrapper=True)"),
        "hook offload_observe is a generator or a wrapper of hooks",
    ),
    "async behind a plain function": (
        f"async def types(): return []\n{_hook(REGISTER, body='return types()')}",
        "the hook returned a coroutine, which nobody awaits",
    ),
    "forgotten return": (_hook(REGISTER, body="[]"), "offload_register_backends returned None; it must return a list"),
    "not a backend type": (_hook(REGISTER, body="return [Medium]"), "it must return BackendType objects"),
    "a type without a name": (
        _hook(REGISTER, body="return [BackendType(['x'], Medium, Options)]"),
        "backend type ['x']: its name must begin with a letter a to z",
    ),
    "a type with a bad name": (
        _hook(REGISTER, body="return [BackendType('my type', Medium, Options)]"),
        "backend type 'my type': its name must begin with a letter a to z",
    ),
    "not a list": (_hook(REGISTER, body="return BackendType('x', Medium, Options)"), "it must return a list"),
    "wrong base class": (
        _hook(REGISTER, body="return [BackendType('wrong', dict, Options)]"),
        "backend type 'wrong': <class 'dict'> is not a subclass of Backend",
    ),
    "an object for a class": (
        _hook(REGISTER, body="return [BackendType('wrong', 'Medium', Options)]"),
        "backend type 'wrong': 'Medium' is not a subclass of Backend",
    ),
    "a generator in place of a coroutine": (
        "class Many(Medium):\n    async def contains(self, keys):\n        yield True\n"
        + _hook(REGISTER, body="return [BackendType('wrong', Many, Options)]"),
        "backend type 'wrong': Many.contains is a generator, which nobody awaits; write async def contains without",
    ),
    "a plain generator": (
        "class Many(Medium):\n    def open(self):\n        yield\n"
        + _hook(REGISTER, body="return [BackendType('wrong', Many, Options)]"),
        "backend type 'wrong': Many.open is a generator, which nobody awaits; write async def open without yield",
    ),
    "a constructor without arguments": (
        "class Empty(Medium):\n    def __init__(self): pass\n"
        + _hook(REGISTER, body="return [BackendType('wrong', Empty, Options)]"),
        "backend type 'wrong': Empty cannot be made from options and a context (too many positional arguments); write",
    ),
    "not an options class": (
        _hook(REGISTER, body="return [BackendType('wrong', Medium, dict)]"),
        "backend type 'wrong': <class 'dict'> is not a subclass of BackendOptions",
    ),
    "the same type twice": (
        _hook(REGISTER, body="return [BackendType('twice', Medium, Options)] * 2"),
        "the backend type 'twice' is provided more than once by m-broken 1.0; its author must choose one",
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
    registry.require("a-good")
    errors = {report.name: report.error for report in registry.reports}
    assert errors["a-good"] is None
    assert errors["z-good"] is None
    assert errors["m-broken"] is not None
    assert message in errors["m-broken"]
    assert "\n" not in errors["m-broken"]
    with pytest.raises(PluginError) as caught:
        registry.backend_type("of-the-broken-one")
    for part in (
        "'of-the-broken-one'",
        "known types: first, last",
        f"- plugin 'm-broken' of m-broken 1.0: {errors['m-broken']}",
    ):
        assert part in str(caught.value)
    with pytest.raises(PluginError) as caught:
        registry.require("m-broken")
    assert str(caught.value) == f"plugin 'm-broken' of m-broken 1.0 failed: {errors['m-broken']}"


def test_a_plain_method_may_return_a_coroutine(site: Site) -> None:
    site.install(
        "good",
        """
        import functools

        import types

        def logged(method):
            @functools.wraps(method)
            def call(*arguments):
                return method(*arguments)
            return call

        def nameless(method):
            return lambda *arguments: method(*arguments)

        class Logged(Medium):
            @logged
            async def contains(self, keys):
                return [False for _ in keys]

            @nameless
            async def store(self, keys, buffers):
                return []

            async def _remove(self, how, keys):
                pass

            delete = functools.partialmethod(_remove, "all")

            @types.coroutine
            def close(self):
                yield

        class Forwarding(Logged):
            def contains(self, keys):
                return super().contains(keys)

        @hookimpl
        def offload_register_backends():
            return [BackendType("logged", Logged, Options), BackendType("forwarding", Forwarding, Options)]
        """,
    )
    registry = site.load()
    assert [report.error for report in registry.reports] == [None]
    assert set(registry.backend_types) == {"logged", "forwarding"}


def test_several_failed_plugins_are_listed_one_below_the_other(site: Site) -> None:
    site.install("good", WORKS.format(name="disc"))
    site.install("one", "raise RuntimeError('no device')")
    site.install("two", "raise ValueError('first line\\nsecond line')")
    with pytest.raises(PluginError) as caught:
        site.load().backend_type("disk")
    assert str(caught.value).splitlines() == [
        "no plugin provides the backend type 'disk' (did you mean 'disc'?); known types: disc; "
        "install the package that provides it (entry point group 'offload_core')",
        "    plugins that failed and might provide it:",
        "      - plugin 'one' of one 1.0: RuntimeError: no device",
        "      - plugin 'two' of two 1.0: ValueError: first line second line",
    ]


def test_the_keyboard_interrupt_of_an_operator_ends_the_loading(site: Site) -> None:
    site.install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


def test_the_report_of_a_failed_plugin_says_how_far_it_came(site: Site) -> None:
    site.install("old", "OFFLOAD_API_VERSION = 0", value="old [fast]")
    site.install("raising", _hook(REGISTER, body="raise OSError('no driver')"))
    old, raising = site.load().reports
    assert (old.module, old.api_version, old.hooks) == ("old [fast]", 0, ())
    assert (raising.module, raising.api_version, raising.hooks) == ("raising", 1, (REGISTER,))
    assert raising.backend_types == ()


def test_the_core_serves_a_range_of_api_versions(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hookspecs, "OLDEST_API_VERSION", 2)
    monkeypatch.setattr(hookspecs, "API_VERSION", 4)
    for version in range(1, 6):
        site.install(f"v{version}", f"OFFLOAD_API_VERSION = {version}\n" + WORKS.format(name=f"t{version}"))
    registry = site.load()
    assert set(registry.backend_types) == {"t2", "t3", "t4"}
    errors = [report.error for report in registry.reports if report.error]
    serves = f"and offload-core {__version__} serves API versions 2 to 4"
    assert errors == [
        f"v1 1.0 is written for API version 1 {serves}; pip install --upgrade v1",
        f"v5 1.0 is written for API version 5 {serves}; pip install --upgrade offload-core",
    ]


def test_an_entry_point_that_names_an_object_is_an_error(site: Site) -> None:
    site.install("object", WORKS.format(name="t"), value="object:Medium")
    (report,) = site.load().reports
    assert "it must name a module with hook functions" in str(report.error)


def test_an_entry_point_that_names_nothing_is_an_error(site: Site) -> None:
    site.install("words", WORKS.format(name="t"), value="two words")
    (report,) = site.load().reports
    assert report.error == "entry point 'two words' is not the name of a module; its author must write package.module"


def test_an_entry_point_may_have_extras(site: Site) -> None:
    site.install("fancy", WORKS.format(name="t"), value="fancy [redis]")
    site.install("poor", "import a_missing_package", value="poor [redis, tls]")
    fancy, poor = site.load().reports
    assert (fancy.module, fancy.error) == ("fancy [redis]", None)
    assert poor.error is not None
    assert poor.error.endswith("which is missing: pip install 'poor[redis,tls]'")


def test_a_hook_of_a_newer_core_may_be_optional(site: Site) -> None:
    site.install("ahead", WORKS.format(name="t") + _hook("offload_later", marker="@hookimpl(optionalhook=True)"))
    (report,) = site.load().reports
    assert (report.hooks, report.error) == ((REGISTER,), None)


def test_warnings_at_import_are_shown_and_harm_nobody(site: Site) -> None:
    site.install("talkative", "import warnings\nwarnings.warn('soon gone', FutureWarning)\n" + WORKS.format(name="t"))
    with pytest.warns(FutureWarning, match="soon gone"):
        registry = site.load()
    assert registry.backend_type("t")


def test_nothing_of_a_module_is_touched_that_is_no_hook(site: Site) -> None:
    lazy = "def __getattr__(name):\n    raise RuntimeError(name)\n\ndef __dir__():\n    return [*globals(), 'lazy']\n"
    site.install("lazy", lazy + WORKS.format(name="t"))
    (report,) = site.load().reports
    assert report.error is None


def test_one_entry_point_name_in_two_distributions_is_refused_for_both(site: Site) -> None:
    site.install("one", WORKS.format(name="t1"), name="same")
    site.install("two", WORKS.format(name="t2"), name="same")
    site.install("other", WORKS.format(name="t3"))
    registry = site.load()
    assert set(registry.backend_types) == {"t3"}
    text = r"the entry point name 'same' is used by one 1\.0 and two 1\.0; uninstall one of them"
    with pytest.raises(PluginError, match=text):
        registry.backend_type("t1")
    with pytest.raises(PluginError, match=text):
        registry.require("same")


def test_one_entry_point_name_twice_in_one_distribution_is_refused(site: Site) -> None:
    site.install("one", WORKS.format(name="t1"))
    site.declare("pair", "same = one", "same = two")
    registry = site.load()
    assert [report.error for report in registry.reports if report.name == "same"] == [
        "the entry point name 'same' is used more than once by pair 1.0; its author must choose one"
    ] * 2


def test_one_module_under_two_names_is_refused_for_both(site: Site) -> None:
    site.install("one", WORKS.format(name="t1"))
    site.declare("two", "alias = one [extra]")
    registry = site.load()
    assert set(registry.backend_types) == set()
    assert [report.error for report in registry.reports] == [
        "the module 'one' is named as a plugin by one 1.0 and two 1.0; uninstall one of them"
    ] * 2


def test_one_backend_type_in_two_distributions_is_refused_for_both(site: Site) -> None:
    site.install("one", WORKS.format(name="same"))
    site.install("two", WORKS.format(name="same") + _hook(OBSERVE, "event"))
    site.install("other", WORKS.format(name="t3"))
    registry = site.load()
    assert set(registry.backend_types) == {"t3"}
    assert registry.observers == (), "nothing of a refused plugin is used"
    with pytest.raises(
        PluginError, match=r"the backend type 'same' is provided by one 1\.0 and two 1\.0; uninstall one of them"
    ):
        registry.backend_type("same")


def test_a_distribution_in_two_places_does_not_conflict_with_itself(site: Site) -> None:
    site.install("my-box", WORKS.format(name="box"))
    site.install("My_Box", WORKS.format(name="box"), name="my-box", value="my_box", folder=1)
    (report,) = site.load().reports
    assert (report.distribution, report.error) == ("my-box", None)
    (found,) = [report for report in load_plugins().reports if report.name == "my-box"]
    assert found == report


def test_without_any_plugin_the_error_says_how_to_get_one() -> None:
    with pytest.raises(PluginError, match="known types: none; install the package that provides it"):
        load_plugins([]).backend_type("disk")


def test_a_half_removed_distribution_stops_no_plugin(site: Site) -> None:
    site.install("good", WORKS.format(name="first"))
    site.install("torn", WORKS.format(name="second"))
    (site.folders[0] / "torn-1.0.dist-info" / "METADATA").unlink()
    good, torn = site.load().reports
    assert (good.error, good.distribution) == (None, "good")
    assert (torn.error, torn.distribution, torn.version) == (None, "an unknown distribution", None)


def test_an_entry_point_of_no_distribution_can_be_loaded(site: Site) -> None:
    site.install("loose", WORKS.format(name="t"))
    (report,) = load_plugins([EntryPoint("loose", "loose", "offload_core")]).reports
    assert (report.distribution, report.version, report.error) == ("an unknown distribution", None, None)


def test_the_installed_distribution_provides_the_disk_backend() -> None:
    registry = load_plugins()
    assert registry.backend_type("disk").name == "disk"
    (report,) = [report for report in registry.reports if "disk" in report.backend_types]
    assert (report.name, report.distribution, report.version) == ("disk", "offload-core", __version__)
    assert (report.module, report.api_version) == ("offload_backend_disk.plugin", hookspecs.API_VERSION)


def test_required_plugins_must_be_there_and_work(site: Site) -> None:
    site.install("box", WORKS.format(name="box"))
    site.install("cipher", "raise RuntimeError('no key')")
    registry = site.load()
    backends = [{"name": "b", "type": "box"}]
    assert load_config({"required_plugins": ["box"], "backends": backends}, registry).plugins is registry
    with pytest.raises(ConfigError) as caught:
        load_config({"required_plugins": ["box", "cipher", "cypher", 5], "backends": backends}, registry)
    shape, failed, missing = caught.value.problems
    assert shape.startswith("required_plugins.3: 5 is not valid")
    assert failed == "required_plugins.1: plugin 'cipher' of cipher 1.0 failed: RuntimeError: no key"
    assert missing == (
        "required_plugins.2: there is no plugin 'cypher' (did you mean 'cipher'?); known plugins: box, cipher; "
        "install the package that provides it (entry point group 'offload_core')"
    )


REQUIRES = """
from offload_core.api import Requirement

@hookimpl
def offload_register_backends():
    return [BackendType("needy", Medium, Options, requires=(Requirement({module!r}, "pip install 'needy[all]'"),))]
"""


def test_a_missing_module_is_named_with_its_cure_when_a_configuration_needs_the_type(site: Site) -> None:
    site.install("needy", REQUIRES.format(module="no_such_module"))
    registry = site.load()
    missing = "the Python module 'no_such_module' is not installed; run: pip install 'needy[all]'"
    assert [(report.missing, report.error) for report in registry.reports] == [((missing,), None)]
    with pytest.raises(ConfigError) as caught:
        load_config({"backends": [{"name": "far", "type": "needy"}]}, registry)
    assert f"backends.0.type: backend type 'needy' cannot be used: {missing}" in str(caught.value)


def test_a_required_module_that_is_there_is_not_imported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folders[0] / "required_but_broken.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(site.folders[0]))
    site.install("needy", REQUIRES.format(module="required_but_broken"))
    registry = site.load()
    assert registry.backend_type("needy").name == "needy"
    assert [report.missing for report in registry.reports] == [()]


def test_a_required_module_without_a_spec_counts_as_installed_and_stops_no_plugin(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("imported_by_hand")
    assert module.__spec__ is None
    monkeypatch.setitem(sys.modules, "imported_by_hand", module)
    site.install("needy", REQUIRES.format(module="imported_by_hand"))
    registry = site.load()
    assert registry.backend_type("needy").name == "needy"
    assert [report.missing for report in registry.reports] == [()]


def test_an_error_without_a_readable_text_fails_its_plugin_only(site: Site) -> None:
    site.install("good", WORKS.format(name="good-type"))
    site.install(
        "odd", "class OddError(Exception):\n    def __str__(self):\n        return self.message\nraise OddError"
    )
    registry = site.load()
    assert [report.error for report in registry.reports] == [None, "OddError: its text cannot be read"]


@pytest.mark.parametrize("module", ["", "a.b", "a b"])
def test_a_requirement_that_names_no_top_level_module_is_refused(site: Site, module: str) -> None:
    site.install("needy", REQUIRES.format(module=module))
    (report,) = site.load().reports
    assert report.error is not None
    assert "it must be a Requirement with the name of a top-level module" in report.error


def test_no_engine_of_a_bundled_backend_is_imported_before_a_configuration_names_its_type() -> None:
    engines = {"lmcache", "mooncake", "nixl", "nixl_cu12", "botocore", "s3fs", "torch", "vllm"}
    script = (
        "import sys; from offload_core.config.loading import load_config; "
        "load_config({'backends': [{'name': 'ram', 'type': 'cpu', 'capacity': '1MiB'}]}); "
        f"print(sorted({engines} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
