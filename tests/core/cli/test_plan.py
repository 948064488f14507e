"""``offload-core plan``: in this process, which is quicker, and once through its entry point."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from offload_core.objects.format import HEADER_BYTES
from tests.support.paths import ROOT

GEOMETRIES = ROOT / "examples" / "geometries"
COMMAND = Path(sys.executable).with_name("offload-core")
VARIABLES = {"COLUMNS": "160", "NO_COLOR": "1"}
MIB = 1 << 20


def plan(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    arguments = ["plan", *map(str, words)]
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, arguments, env=VARIABLES, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def plans(*words: object) -> list[dict[str, Any]]:
    done = plan(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)["plans"]
    assert isinstance(found, list)
    return found


def refused(*words: object) -> str:
    """The output of a refused command: nothing but one line or list on stderr."""
    done = plan(*words)
    assert (done.returncode, done.stdout) == (1 if "refused: " in done.stderr else 2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def geometry(tmp_path: Path, *groups: dict[str, Any], **keys: Any) -> Path:
    group = {"block_size_tokens": 16, "policy": "full", "pages": [{"count": 2, "page_bytes": 1000}]}
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps({"hash_block_size_tokens": 16, "groups": list(groups or [group]), **keys}))
    return path


def test_deepseek_v4_makes_three_objects_per_chunk_of_1024_tokens() -> None:
    (found,) = plans(GEOMETRIES / "deepseek-v4.yaml")
    assert (found["hybrid_chunk_size"], found["boundary_tokens"]) == (1024, 1024)
    assert found["objects_per_1000_tokens"] * 1.024 == pytest.approx(3)
    assert [group["hash_factor"] for group in found["groups"]] == [256] * 5
    assert [group["blocks_per_object"] for group in found["groups"]] == [2, 2, 4, 2, 16]
    assert {pack["name"]: (pack["groups"], pack["payload_bytes"]) for pack in found["packs"]} == {
        "window-u1024-w128": ([0, 1, 4], 2 * 2 * 3 * 37376 + 16 * 3 * 32768),
        "full-u1024": ([2], 4 * 3 * (37376 + 8448 + 1168)),
        "window-u1024-w8": ([3], 2 * 3 * (32768 + 8192)),
    }
    payload = sum(pack["payload_bytes"] for pack in found["packs"])
    assert found["bytes_per_1000_tokens"] * 1.024 == pytest.approx(payload + 3 * HEADER_BYTES)
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("name", "chunk", "packs"),
    [
        ("gemma-3-4b", 256, {"window-u256-w1024": 29 * MIB, "full-u256": 5 * MIB}),
        ("gpt-oss-20b", 256, {"window-u256-w128": 3 * MIB, "full-u256": 6 * MIB}),
        ("qwen3-next-80b", 544, {"state-u544": 36 * 1097728, "full-u544": 12 * 1114112}),
        ("deepseek-v4", 1024, None),
    ],
)
def test_every_example_is_planned_without_a_warning(name: str, chunk: int, packs: dict[str, int] | None) -> None:
    assert {path.stem for path in GEOMETRIES.iterdir()} == {
        "gemma-3-4b", "gpt-oss-20b", "qwen3-next-80b", "deepseek-v4",
    }  # fmt: skip
    (found,) = plans(GEOMETRIES / f"{name}.yaml")
    assert (found["hybrid_chunk_size"], found["warnings"]) == (chunk, [])
    if packs is not None:
        assert {pack["name"]: pack["payload_bytes"] for pack in found["packs"]} == packs


def test_the_tables_show_what_the_json_holds() -> None:
    done = plan("examples/geometries/gpt-oss-20b.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    cells = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "16", "window", "128", "256", "16", "8", "window-u256-w128", "windows"] in cells
    assert ["1", "16", "full", "256", "16", "16", "full-u256", "full", "attention"] in cells
    assert ["window-u256-w128", "256", "3,145,728", "3.91", "12,304,000"] in cells
    assert ["full-u256", "256", "6,291,456", "3.91", "24,592,000"] in cells
    assert ["total", "7.81", "36,896,000"] in cells
    assert "hybrid_chunk_size: 256 tokens (default: 256)" in done.stdout
    assert "a prompt of 257 tokens is the shortest that can be loaded" in done.stdout
    assert "per 1,000 tokens of a prompt of 100,096 tokens" in done.stdout


def test_the_ranks_store_objects_of_their_own(tmp_path: Path) -> None:
    (one,) = plans(geometry(tmp_path))
    (two,) = plans(geometry(tmp_path, ranks=2))
    assert two["packs"][0]["payload_bytes"] == one["packs"][0]["payload_bytes"] == 16 * 2000
    assert two["bytes_per_1000_tokens"] == 2 * one["bytes_per_1000_tokens"]
    assert "on all 2 ranks together" in plan(geometry(tmp_path, ranks=2)).stdout


def test_the_chunk_size_comes_from_the_option_then_the_configuration_then_the_geometry(tmp_path: Path) -> None:
    path = geometry(tmp_path, hybrid_chunk_size=512)
    config = tmp_path / "offload.yaml"
    backend = "backends: [{name: d, type: disk, path: kv}]"
    config.write_text(f"hybrid_chunk_size: 1024\n{backend}")
    assert [found["hybrid_chunk_size"] for found in plans(path)] == [512]
    assert [found["hybrid_chunk_size"] for found in plans(path, "--config", config)] == [1024]
    assert [found["hybrid_chunk_size"] for found in plans(path, "--config", config, "--chunk-size", 64)] == [64]
    config.write_text(backend)
    assert [found["hybrid_chunk_size"] for found in plans(path, "--config", config)] == [256]


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    config = tmp_path / "missing.yaml"
    done = plan(geometry(tmp_path), "--config", config)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].endswith(f"in {config}:")


def test_a_configuration_with_too_little_staging_is_refused_as_the_engine_would(tmp_path: Path) -> None:
    config = tmp_path / "offload.yaml"
    config.write_text("staging_bytes: 32MiB\nbackends: [{name: d, type: disk, path: kv}]")
    assert refused(GEOMETRIES / "gemma-3-4b.yaml", "--config", config).startswith(
        "refused: staging_bytes: 33554432 is too small for this model's objects of up to 30408704 bytes; set it to "
    )
    assert plans(GEOMETRIES / "gpt-oss-20b.yaml", "--config", config)


def test_warnings_are_those_of_the_engine() -> None:
    done = plan(GEOMETRIES / "gpt-oss-20b.yaml", "--chunk-size", "1000")
    assert done.returncode == 0
    assert (
        "warning: group 1: hybrid_chunk_size 1000 is not a multiple of its block size 16, so it is stored block by "
        "block; the nearest good hybrid_chunk_size is 1008\n"
    ) in done.stdout


def test_an_impossible_chunk_size_is_refused_with_the_cure() -> None:
    chunk = ("--chunk-size", "131072")
    message = refused(GEOMETRIES / "gpt-oss-20b.yaml", *chunk)
    assert message == (
        "refused: hybrid_chunk_size 131072 gives the first boundary at 131072 tokens (units of group 0: 131072, group "
        "1: 131072), but max_model_len is 131072 and the last token is always computed, so nothing could ever be "
        "loaded; set hybrid_chunk_size to 256\n"
    )
    done = plan(GEOMETRIES / "gpt-oss-20b.yaml", *chunk, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["plans"] == [
        {"hybrid_chunk_size": 131072, "refusal": message.removeprefix("refused: ").strip()}
    ]


def test_several_chunk_sizes_are_compared_and_refused_ones_have_their_reason() -> None:
    sizes = [word for size in (256, 1024, 0) for word in ("--chunk-size", size)]
    done = plan(GEOMETRIES / "gpt-oss-20b.yaml", *sizes)
    assert (done.returncode, done.stderr) == (0, "")
    cells = [line.split() for line in done.stdout.splitlines()]
    assert ["256", "256", "6,291,456", "7.81", "36,896,000"] in cells
    assert ["1,024", "1,024", "25,165,824", "1.95", "27,656,000"] in cells
    assert "hybrid_chunk_size 0: refused: hybrid_chunk_size is 0; it must be a positive number" in done.stdout
    found = plans(GEOMETRIES / "gpt-oss-20b.yaml", *sizes)
    assert [item["hybrid_chunk_size"] for item in found] == [256, 1024, 0]
    assert ["refusal" in item for item in found] == [False, False, True]


def test_only_where_all_chunk_sizes_are_refused_the_command_fails() -> None:
    message = refused(GEOMETRIES / "gpt-oss-20b.yaml", "--chunk-size", 0, "--chunk-size", -1)
    assert [line.split(";")[0] for line in message.splitlines()] == [
        "hybrid_chunk_size 0: refused: hybrid_chunk_size is 0",
        "hybrid_chunk_size -1: refused: hybrid_chunk_size is -1",
    ]


def test_a_group_of_which_nothing_is_stored_is_named(tmp_path: Path) -> None:
    page = [{"count": 1, "page_bytes": 64}]
    groups = [{"block_size_tokens": 16, "policy": policy, "pages": page} for policy in ("full", "chunked 256")]
    done = plan(geometry(tmp_path, *groups))
    cells = [line.split() for line in done.stdout.splitlines()]
    assert [*["1", "16", "chunked", "256", "256", "16", "0", "none:", "never", "needed"]] in cells


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"block_size_token": 16}, "groups.0.block_size_token: unknown key (did you mean 'block_size_tokens'?)"),
        ({"block_size_tokens": 0}, "groups.0.block_size_tokens: 0 is not valid: Input should be greater than"),
        ({"policy": "windows"}, "groups.0.policy: 'windows' is not valid: write full, state, window N or chunked N"),
    ],
)
def test_a_bad_geometry_is_refused_with_every_problem(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    group = {"block_size_tokens": 16, "policy": "full", "pages": [{"count": 2, "page_bytes": 1000}], **change}
    path = geometry(tmp_path, group, ranks=0)
    message = refused(path)
    assert message.startswith(f"2 problems in {path} (geometry):\n")
    assert f"  - {problem}" in message
    assert "  - ranks: 0 is not valid" in message


def test_a_geometry_without_groups_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "geometry.yaml"
    path.write_text("hash_block_size_tokens: 16\ngroups: []\n")
    assert "groups: a list is not valid: List should have at least 1 item" in refused(path)


def test_a_block_size_that_the_hashes_do_not_fill_is_refused_as_the_engine_would(tmp_path: Path) -> None:
    path = geometry(tmp_path, hash_block_size_tokens=5)
    assert refused(path).startswith("refused: group 0: block size 16 is not a multiple of the engine's hash block size")


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    done = plan("absent.json", cwd=tmp_path)
    assert done.returncode == 2
    assert f"geometry: 'absent.json' does not exist (looked in {tmp_path})" in done.stderr


def test_a_bad_configuration_is_refused_with_its_problems(tmp_path: Path) -> None:
    config = tmp_path / "offload.yaml"
    config.write_text("hybrid_chunk: 256\nbackends: [{name: d, type: disk, path: kv}]")
    message = refused(GEOMETRIES / "gpt-oss-20b.yaml", "--config", config)
    assert "hybrid_chunk: unknown key (did you mean 'hybrid_chunk_size'?)" in message


def test_names_from_the_file_are_printed_as_they_are(tmp_path: Path) -> None:
    group = {"block_size_tokens": 16, "policy": "full", "pages": [{"count": 2, "page_bytes": 1000}], "name": "[red]a"}
    done = plan(geometry(tmp_path, group, model="[bold]b :cat:"))
    assert "model: [bold]b :cat:" in done.stdout
    assert "full-u256  [red]a" in done.stdout


def test_the_document_shows_what_the_command_prints() -> None:
    block = next(
        b for b in (ROOT / "docs" / "cli.md").read_text().split("```") if b.startswith("console\n$ offload-core plan")
    )
    command, *lines = block.removeprefix("console\n$ ").splitlines()
    done = subprocess.run(
        [COMMAND, *command.split()[1:]],
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == lines


def test_the_help_teaches() -> None:
    done = plan("--help")
    assert done.returncode == 0
    for word in ("GEOMETRY", "--config", "--chunk-size", "--json", "geometry_file", "Example:"):
        assert word in done.stdout


def test_nothing_of_torch_or_vllm_is_needed() -> None:
    script = (
        "import sys; from offload_core.cli import app; "
        f"app(['plan', {str(GEOMETRIES / 'gemma-3-4b.yaml')!r}], standalone_mode=False); "
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "window-u256-w1024" in done.stdout
