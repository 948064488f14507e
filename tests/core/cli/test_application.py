"""The rules that hold for every command."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main

from offload_core.cli import app
from tests.core.cli.conftest import Site, ended

COMMANDS = sorted(typer.main.get_group(app).commands)
WITH_CONFIG = ["bench", "check", "ls", "prune", "stats", "verify"]
CRITERION = {"prune": ["--older-than", "30d", "--dry-run"]}


def test_no_command_is_left_out() -> None:
    assert {*WITH_CONFIG, "plugins", "schema"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command: str, site: Site) -> None:
    done = site.invoke(command, "--help")
    assert done.code == 0
    assert f"offload-core {command}" in done.out.partition("Example")[2]


def test_help_of_the_whole_says_what_exit_codes_mean(site: Site) -> None:
    done = site.run("--help")
    assert (done.code, done.err) == (0, "")
    for line in ("0: success", "1: a tier", "2: the command line or the configuration", "130: interrupted"):
        assert line in done.out


def test_the_module_runs_like_the_console_script(site: Site) -> None:
    for arguments in (["plugins", "--json"], ["unknown"]):
        by_module = ended(site.start_process(sys.executable, "-m", "offload_core.cli", *arguments))
        assert by_module == site.run(*arguments)


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_a_missing_file_is_named(command: str, site: Site) -> None:
    done = site.invoke(command, "nowhere.yaml", "--json", *CRITERION.get(command, []))
    assert done.code == 2
    assert "'nowhere.yaml' does not exist" in done.err
    (problem,) = done.json["problems"]
    assert "'nowhere.yaml' does not exist" in problem


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_every_problem_of_a_configuration_is_printed(command: str, site: Site) -> None:
    config = site.configure({"name": "nvme", "pth": "x"}, stagin_bytes=5)
    done = site.invoke(command, config, *CRITERION.get(command, []))
    assert (done.code, done.out) == (2, "")
    assert f"2 problems in {config}:" in done.err
    assert "stagin_bytes: unknown key (did you mean 'staging_bytes'?)" in done.err
    assert "backends.0.pth: unknown key (did you mean 'path'?)" in done.err
    assert not site.path("nvme").exists()


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_an_unknown_tier_is_named_with_the_one_that_was_meant(command: str, site: Site) -> None:
    config = site.configure({"name": "nvme"}, {"name": "shared"})
    done = site.invoke(command, config, "--tier", "nvne", *CRITERION.get(command, []))
    assert (done.code, done.out) == (2, "")
    assert "--tier: 'nvne' is no tier of this configuration (did you mean 'nvme'?); its tiers: nvme, shared" in done.err


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_only_the_tiers_that_are_named_are_opened(command: str, site: Site) -> None:
    config = site.configure({"name": "a"}, {"name": "b"}, {"name": "c"})
    done = site.invoke(command, config, "--json", "--tier", "c", "--tier", "a", *CRITERION.get(command, []))
    assert done.code == 0, done.err
    assert [tier["tier"] for tier in done.json["tiers"]] == ["a", "c"]
    assert not site.path("b").exists()


@pytest.mark.parametrize("command", WITH_CONFIG)
@pytest.mark.parametrize("fails", ["construct", "open"])
def test_a_tier_that_cannot_be_opened_is_named_and_the_others_are_done(command: str, fails: str, site: Site) -> None:
    config = site.configure({"name": "bad", "type": "odd", "fails": fails}, {"name": "good"})
    done = site.invoke(command, config, "--json", *CRITERION.get(command, []))
    assert done.code == 1
    cause = {"construct": "construct: RuntimeError: no device", "open": "open: [Errno 5] the open failed"}[fails]
    assert f"tier 'bad': {cause}" in done.err
    assert [tier["error"] for tier in done.json["tiers"]] == [cause, None]


@pytest.mark.parametrize("command", ["ls", "prune", "stats", "verify"])
def test_tiers_that_do_not_list_are_skipped_and_it_is_an_error_when_none_is_left(command: str, site: Site) -> None:
    config = site.configure({"name": "mute", "type": "odd", "lists": False}, {"name": "good"})
    reason = "the backend type 'odd' does not list its objects"
    done = site.invoke(command, config, "--json", *CRITERION.get(command, []))
    assert done.code == 0
    assert [tier["skipped"] for tier in done.json["tiers"]] == [reason, None]
    assert f"tier 'mute': skipped: {reason}" in done.err
    alone = site.invoke(command, config, "--tier", "mute", *CRITERION.get(command, []))
    assert alone.code == 1
    assert reason in alone.err


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_a_medium_of_one_process_is_said_to_be_an_empty_one(command: str, site: Site) -> None:
    config = site.configure({"name": "ram", "type": "odd", "per_process": True})
    done = site.invoke(command, config, *CRITERION.get(command, []))
    assert done.code == 0
    assert "tier 'ram': keeps its objects in one process; this command sees an empty medium of its own" in done.err


@pytest.mark.parametrize("command", ["ls", "prune", "stats", "verify"])
@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ({"fails": "list"}, "list: [Errno 5] the list failed"),
        ({"gated": "list"}, "list: no answer within 0.2 s (load_t"),
    ],
    ids=["failing", "hung"],
)
def test_a_listing_that_fails_or_hangs_is_named(command: str, odd: dict[str, str], error: str, site: Site) -> None:
    gate = str(site.gate()) if "gated" in odd else None
    config = site.configure({"name": "bad", "type": "odd", "gate": gate, "load_timeout_seconds": 0.2, **odd})
    run = site.run if "gated" in odd else site.invoke  # a thread that hangs would stay in this process
    done = run(command, config, *CRITERION.get(command, []))
    assert done.code == 1
    assert f"tier 'bad': {error}" in done.err


def test_commands_start_without_torch(site: Site) -> None:
    config = site.configure({"name": "nvme"})
    script = f"""
import sys
from offload_core.cli import app
for words in (["plugins"], ["check", {config!r}], ["verify", {config!r}], ["bench", {config!r}, "--objects", "1"]):
    try:
        app(words)
    except SystemExit as ended:
        assert not ended.code, ended.code
assert not {{"torch", "vllm"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=site.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
