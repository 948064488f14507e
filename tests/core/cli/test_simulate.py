"""``offload-core simulate``: tables, documents, plots and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from offload_core.cli.curve_plot import Curve, Point, curve_plot
from offload_core.objects.format import object_bytes
from tests.core.cli.conftest import Site
from tests.support.prompt_traces import conversations, trace_of, write_lines, write_trace

PAGE_BYTES = 4096
OBJECT_BYTES = object_bytes(PAGE_BYTES)
PROMPTS = conversations(4, 5, 64)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl.gz", trace_of(PROMPTS, 16))


@pytest.fixture
def geometry(tmp_path: Path) -> Path:
    return geometry_file(tmp_path)


def geometry_file(tmp_path: Path, **keys: Any) -> Path:
    pages = [{"count": 1, "page_bytes": PAGE_BYTES}]
    groups = [{"block_size_tokens": 16, "policy": policy, "pages": pages} for policy in ("full", "window 32")]
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps({"hash_block_size_tokens": 16, "hybrid_chunk_size": 16, "groups": groups, **keys}))
    return path


def simulate(*words: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["simulate", *map(str, words)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done


def simulated(*words: object) -> dict[str, Any]:
    """Return the document; what its only tier has is beside what its run has."""
    document = json.loads(simulate(*words, "--json").stdout)
    assert isinstance(document, dict)
    for run in document["runs"]:
        if len(run["tiers"]) == 1:
            run |= run["tiers"][0]
    return document


def test_the_document_has_one_entry_per_placement_and_capacity(trace: Path, geometry: Path) -> None:
    found = simulated(
        trace, "--geometry", geometry, "--capacity", "300KiB, 1MiB,none,1024KiB",
        "--placement", "everything", "--placement", "kept", "--placement", "kept",
    )  # fmt: skip
    assert [(run["placement"], run["capacity_bytes"]) for run in found["runs"]] == [
        (placement, capacity) for placement in ("everything", "kept") for capacity in (300 << 10, 1 << 20, None)
    ]
    assert (found["block_tokens"], found["hybrid_chunk_size"]) == (16, 16)
    assert {run["eviction"] for run in found["runs"]} == {"lru"}
    assert found["requests"] == len(PROMPTS)
    assert found["input_tokens"] == sum(map(len, PROMPTS))
    for run in found["runs"]:
        assert run["hit_rate"] == run["hit_tokens"] / found["input_tokens"]
        assert run["written_bytes"] == run["written_objects"] * OBJECT_BYTES
        assert run["read_bytes"] == run["read_objects"] * OBJECT_BYTES
        assert run["written_bytes"] - run["evicted_bytes"] <= run["peak_bytes"]
        assert run["peak_bytes"] <= (run["capacity_bytes"] or run["written_bytes"])
    limited, _, unlimited = found["runs"][:3]
    assert limited["hit_rate"] < unlimited["hit_rate"]
    assert limited["evicted_objects"] > unlimited["evicted_objects"] == 0


def configuration(tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "offload.json"
    ram = {"name": "ram", "type": "cpu", "capacity": "100KiB", "eviction": "slru", "load_weight": 10}
    disk = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv"), "write_policy": "second-touch"}
    path.write_text(json.dumps({"backends": [ram, disk], **keys}))
    return path


def test_the_tiers_of_a_configuration_are_simulated_together(trace: Path, geometry: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, placement="kept", hybrid_chunk_size=32)
    found = simulated(trace, "--geometry", geometry, "--config", config)
    (run,) = found["runs"]
    ram, disk = run["tiers"]
    assert (found["hybrid_chunk_size"], run["placement"]) == (32, "kept")
    assert [(tier["tier"], tier["capacity_bytes"], tier["eviction"]) for tier in run["tiers"]] == [
        ("ram", 100 << 10, "slru"), ("disk", None, "lru"),
    ]  # fmt: skip
    assert ram["evicted_objects"] > 0
    assert 0 < disk["written_objects"] < ram["written_objects"], "the second use decides"
    assert run["hit_tokens"] == ram["hit_tokens"] + disk["hit_tokens"]
    assert not (tmp_path / "kv").exists(), "nothing is opened"
    table = simulate(trace, "--geometry", geometry, "--config", config).stdout
    assert re.search(r"^kept +ram +100.0 KiB .*\nkept +disk +no limit ", table, re.MULTILINE), table


def test_the_capacity_of_one_tier_of_a_configuration_varies(trace: Path, geometry: Path, tmp_path: Path) -> None:
    words = [trace, "--geometry", geometry, "--config", configuration(tmp_path), "--capacity", "50KiB,none"]
    last = simulated(*words)["runs"]
    assert [[tier["capacity_bytes"] for tier in run["tiers"]] for run in last] == [
        [100 << 10, 50 << 10], [100 << 10, None],
    ]  # fmt: skip
    named = simulated(*words, "--tier", "ram")["runs"]
    assert [[tier["capacity_bytes"] for tier in run["tiers"]] for run in named] == [[50 << 10, None], [None, None]]
    assert named[0]["hit_tokens"] <= named[1]["hit_tokens"]
    assert "there is no tier 'rum'; the tiers are ram, disk" in simulate(*words, "--tier", "rum", code=2).stderr
    refused = simulate(trace, "--geometry", geometry, "--tier", "ram", code=2).stderr
    assert "it names a tier of a configuration; add --config FILE" in refused


def test_the_watermarks_of_a_tier_count(trace: Path, geometry: Path, tmp_path: Path) -> None:
    def run(**options: Any) -> dict[str, Any]:
        disk = {"name": "nvme", "type": "disk", "path": str(tmp_path / "kv"), "capacity": "300KiB", **options}
        (found,) = simulated(trace, "--geometry", geometry, "--config", configuration(tmp_path, backends=[disk]))[
            "runs"
        ]
        return dict(found)

    exact, half = run(low_watermark=1.0), run(low_watermark=0.5)
    assert half["evicted_objects"] > 0
    assert half["hit_tokens"] < exact["hit_tokens"]
    low = run(low_watermark=0.5, high_watermark=0.5)
    assert low["peak_bytes"] <= (150 << 10) + OBJECT_BYTES < half["peak_bytes"]


def test_keys_that_the_simulation_leaves_out_are_told(trace: Path, geometry: Path, tmp_path: Path) -> None:
    disk = {"name": "nvme", "type": "disk", "path": str(tmp_path / "kv"), "capacity": "1MiB"}
    full = {**disk, "compression": "zstd", "keep_free": "1GiB"}
    told = [
        simulate(trace, "--geometry", geometry, "--config", configuration(tmp_path, backends=[tier])).stderr
        for tier in (disk, full)
    ]
    assert "left out" not in told[0]
    assert "tier nvme: compression and keep_free left out of the simulation" in told[1]


def test_options_of_a_plugin_with_other_meanings_are_left_out(site: Site, trace: Path, geometry: Path) -> None:
    tier = {"name": "theirs", "type": "foreign", "capacity": "80%", "eviction": "fifo", "low_watermark": "auto"}
    done = site.run("simulate", str(trace), "--geometry", str(geometry), "--config", site.configure(tier), "--json")
    assert done.code == 0, done.err
    ((found,),) = (run["tiers"] for run in done.json["runs"])
    assert (found["tier"], found["capacity_bytes"], found["eviction"]) == ("theirs", None, "lru")


def test_a_bad_configuration_is_refused(trace: Path, geometry: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, placement="kepd")
    assert "placement: 'kepd'" in simulate(trace, "--geometry", geometry, "--config", config, code=2).stderr


def test_without_options_the_tier_has_no_limit_and_knows_spare_objects(trace: Path, geometry: Path) -> None:
    (run,) = simulated(trace, "--geometry", geometry)["runs"]
    assert (run["placement"], run["capacity_bytes"], run["evicted_objects"]) == ("kept and spare", None, 0)
    (everything,) = simulated(trace, "--geometry", geometry, "--placement", "everything")["runs"]
    assert run["hit_tokens"] == everything["hit_tokens"] > 0


def test_the_table_shows_what_the_json_holds(trace: Path, geometry: Path) -> None:
    words = (trace, "--geometry", geometry, "--capacity", "300KiB,none")
    runs = simulated(*words)["runs"]
    lines = simulate(*words).stdout.splitlines()
    assert re.split(r"  +", lines[0]) == [
        "placement", "capacity", "hit rate", "written", "read", "evicted", "objects evicted", "peak",
    ]  # fmt: skip
    for run, line, capacity in zip(runs, lines[2:], ("300.0 KiB", "no limit"), strict=True):
        assert line.startswith("kept and spare")
        assert f" {capacity} " in line
        assert f" {run['hit_rate']:.1%} " in line
        assert f" {run['evicted_objects']:,} " in line


def test_the_ranks_share_the_capacity(tmp_path: Path, trace: Path) -> None:
    one, two = (
        simulated(trace, "--geometry", geometry_file(tmp_path, ranks=ranks), "--capacity", capacity)["runs"][0]
        for ranks, capacity in ((1, "300KiB"), (2, "600KiB"))
    )
    assert two["hit_tokens"] == one["hit_tokens"]
    assert two["written_bytes"] == 2 * one["written_bytes"]


def test_tails_are_left_out(tmp_path: Path, trace: Path) -> None:
    with_tails, without = (
        simulated(
            trace, "--geometry", geometry_file(tmp_path, hybrid_chunk_size=32, tails=tails), "--capacity", "300KiB"
        )
        for tails in (True, False)
    )
    assert with_tails["runs"] == without["runs"]


def test_the_chunk_size_and_the_eviction_are_options(trace: Path, geometry: Path) -> None:
    words = (trace, "--geometry", geometry, "--capacity", "300KiB")
    found = simulated(*words, "--chunk-size", 64, "--eviction", "slru")
    assert (found["hybrid_chunk_size"], found["runs"][0]["eviction"]) == (64, "slru")
    assert found["runs"] != simulated(*words, "--chunk-size", 64)["runs"] != simulated(*words)["runs"]


def test_one_process_and_several_find_the_same(trace: Path, geometry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (trace, "--geometry", geometry, "--capacity", "300KiB,1MiB,none")
    results = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cores=cores: cores)
        results.append(simulated(*words))
    assert results[0] == results[1]


def test_the_plot_has_a_point_per_simulation(tmp_path: Path, trace: Path, geometry: Path) -> None:
    plot = tmp_path / "curve.svg"
    words = ("--capacity", "300KiB,1MiB,none", "--placement", "kept", "--placement", "everything", "--plot", plot)
    runs = simulated(trace, "--geometry", geometry, *words)["runs"]
    svg = ElementTree.parse(plot).getroot()
    titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    labels = ("300.0 KiB", "1.0 MiB", "no limit") * 2
    assert titles == [f"{run['placement']}, {at}: {run['hit_rate']:.1%}" for run, at in zip(runs, labels, strict=True)]
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_a_plot_keeps_its_points_inside_and_in_order() -> None:
    points = [Point(size, f"<{size}>", rate) for size, rate in ((1 << 40, 1.0), (1 << 30, 0.0), (None, 0.5))]
    for shown in (points, points[:1], points[2:]):
        svg = curve_plot("a & b", [Curve("kept", shown)])
        root = ElementTree.fromstring(svg)
        assert "a &amp; b" in svg
        xs = {circle[0].text: float(circle.attrib["cx"]) for circle in root.iter("{http://www.w3.org/2000/svg}circle")}
        assert all(64 <= x <= 720 - 24 for x in xs.values())
        assert len(set(xs.values())) == len(shown)
        (line,) = re.findall(r'polyline points="([^"]*)"', svg)
        corners = [float(corner.split(",")[0]) for corner in line.split()]
        assert corners == sorted(corners)


def test_a_plot_that_cannot_be_written_is_told_after_the_table(tmp_path: Path, trace: Path, geometry: Path) -> None:
    done = simulate(trace, "--geometry", geometry, "--plot", tmp_path / "missing" / "curve.svg", code=1)
    assert "kept and spare" in done.stdout
    assert "--plot: [Errno 2]" in done.stderr


def test_requests_longer_than_the_model_allows_are_counted(tmp_path: Path, trace: Path) -> None:
    longest = max(map(len, PROMPTS))
    words = (trace, "--geometry", geometry_file(tmp_path, max_model_len=longest - 1))
    done = simulate(*words)
    assert f"1 requests are longer than max_model_len = {longest - 1} and were left out" in done.stderr
    assert simulated(*words)["requests"] == len(PROMPTS) - 1


def test_a_trace_of_too_long_requests_only_is_a_failure(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", trace_of([tuple(range(100))], 16))
    simulate(trace, "--geometry", geometry_file(tmp_path, max_model_len=64), code=1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--capacity", "much"], "'much' is not a size; write a number of bytes or a size such as 100GiB or 2MiB"),
        (["--capacity", "1GiB,"], "'' is not a size"),
        (["--capacity", "0"], "'0' holds no object"),
        (["--placement", "some"], "'some' is not one of 'kept and spare', 'kept', 'everything'"),
        (["--eviction", "fifo"], "'fifo' is not one of 'lru', 'slru'"),
        (["--block-tokens", "0"], "'--block-tokens'"),
        (["--block-tokens", "32"], "line 1: block_tokens: 16, but 32 was asked for; leave the option out"),
        (["--chunk-size", "0"], "Input should be greater than or equal to 1"),
        (["--eviction", "slru", "--config", "any"], "'--eviction': the tiers of --config have their own"),
        (["--config", "missing.yaml"], "1 problem in missing.yaml"),
        (["--chunk-size", str(1 << 20)], "so nothing could ever be loaded; set hybrid_chunk_size to 256"),
    ],
)
def test_wrong_options_are_refused(trace: Path, geometry: Path, options: list[str], problem: str) -> None:
    done = simulate(trace, "--geometry", geometry, *options, code=2)
    assert problem in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_wrong_files_are_refused(tmp_path: Path, geometry: Path) -> None:
    trace = write_lines(tmp_path / "bad.jsonl", ["{}"])
    assert "line 1: input_length: missing" in simulate(trace, "--geometry", geometry, code=2).stderr
    document = json.loads(simulate(trace, "--geometry", geometry, "--json", code=2).stdout)
    assert document == {"problems": ["line 1: input_length: missing; write an integer of 1 or more"]}
    assert "missing.yaml" in simulate(trace, "--geometry", tmp_path / "missing.yaml", code=2).stderr


def test_the_command_runs_in_a_process_of_its_own(trace: Path, geometry: Path) -> None:
    words = (trace, "--geometry", geometry, "--capacity", "300KiB,none", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "offload_core.cli", "simulate", *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["runs"]) == 2
