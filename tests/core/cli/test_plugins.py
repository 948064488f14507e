"""``offload-core plugins`` and ``offload-core schema``."""

from __future__ import annotations

import json

from tests.core.cli.conftest import Site


def test_plugins_are_listed_with_what_they_provide(site: Site) -> None:
    done = site.run("plugins", "--json")
    assert (done.code, done.err) == (0, "")
    plugins = {plugin["name"]: plugin for plugin in done.json["plugins"]}
    odd = plugins["odd"]
    assert (odd["distribution"], odd["version"], odd["backend_types"]) == ("odd-plugin", "2.5", ["odd", "foreign"])
    assert odd["error"] is None
    assert plugins["disk"]["distribution"] == "offload-core"
    assert {"module", "api_version", "hooks"} <= set(odd)


def test_a_plugin_that_failed_is_shown_with_its_reason(site: Site) -> None:
    site.install("broken", "a_module_that_does_not_exist")
    done = site.invoke("plugins")
    assert done.code == 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("broken")]
    assert "broken-plugin" in line
    assert "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in line
    plugins = site.invoke("plugins", "--json").json["plugins"]
    assert [plugin["name"] for plugin in plugins if plugin["error"]] == ["broken"]
    assert f"1 of {len(plugins)} plugins failed" in done.err


def test_strict_makes_a_failed_plugin_an_error(site: Site) -> None:
    assert site.invoke("plugins", "--strict").code == 0
    site.install("broken", "a_module_that_does_not_exist")
    done = site.invoke("plugins", "--strict", "--json")
    assert done.code == 1
    assert {"broken", "disk", "odd"} <= {plugin["name"] for plugin in done.json["plugins"]}


def test_schema_knows_the_keys_of_the_plugins(site: Site) -> None:
    done = site.invoke("schema")
    assert (done.code, done.err) == (0, "")
    assert "staging_bytes" in done.json["properties"]
    assert "an I/O error" in json.dumps(done.json)


NEEDY = """
from offload_core.api import BackendType, Requirement, hookimpl
from tests.core.cli.odd_backend import OddBackend, OddOptions

OFFLOAD_API_VERSION = 1

@hookimpl
def offload_register_backends():
    return [BackendType("needy", OddBackend, OddOptions, requires=(Requirement("no_such_module", "pip install it"),))]
"""


def test_the_command_that_installs_a_missing_module_is_printed(site: Site) -> None:
    assert "missing" not in site.invoke("plugins").out.splitlines()[0]
    site.install("needy", "needy_plugin")
    (site.plugins / "needy_plugin.py").write_text(NEEDY)
    done = site.invoke("plugins")
    assert done.code == 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("needy")]
    assert "the Python module 'no_such_module' is not installed; run: pip install it" in line
