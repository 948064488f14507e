"""The page of the benchmarks shows the committed results, and a file of results is read or refused with a reason."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.renew import COMMANDS, arguments_of
from benchmarks.reporting import drawings, findings, tables
from benchmarks.reporting.catalogue import CATALOGUE, DOCUMENT, Entry
from benchmarks.reporting.document import RESULTS_FOLDER, ROOT, SCHEMA_VERSION, UnreadableResultsError, read
from benchmarks.reporting.markers import names_in, with_blocks
from benchmarks.reporting.rows import Backends, Codecs, DiskScan, LMCacheConnector

TEXT = DOCUMENT.read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def by_name(entry: Entry) -> str:
    return entry.name


def test_the_tables_are_those_of_the_committed_results() -> None:
    assert with_blocks(TEXT, {entry.name: entry.block() for entry in CATALOGUE}) == TEXT, "run: make plots"


def test_every_result_is_in_the_document_once() -> None:
    names = [entry.name for entry in CATALOGUE]
    assert sorted(names_in(TEXT)) == sorted(names) == sorted(COMMANDS)
    assert sorted(path.stem for path in RESULTS_FOLDER.iterdir()) == sorted(names)


def test_every_section_with_figures_has_its_command_machine_table_and_plot() -> None:
    sections = [section for section in re.split(r"^## ", TEXT, flags=re.MULTILINE) if "<!-- results:" in section]
    assert len(sections) >= 5
    for section in sections:
        for block in re.findall(r"<!-- results: \w+ -->\n(.*?)<!-- end of results -->", section, re.DOTALL):
            assert re.search(r"^\*\*Command:\*\* `python -m benchmarks\.", block, re.MULTILINE)
            assert re.search(r"^\*\*Machine:\*\* .*cores.*Linux.*torch.*Measured on \d{4}-", block, re.MULTILINE)
            assert re.search(r"^\| ---", block, re.MULTILINE)
            assert re.search(r"^!\[.+\]\(plots/\w+\.svg\)$", block, re.MULTILINE)


def test_every_figure_is_within_a_block_that_the_script_writes() -> None:
    prose = re.sub(r"<!-- results: \w+ -->.*?<!-- end of results -->", "", TEXT, flags=re.DOTALL)
    tables = [line for line in prose.splitlines() if line.startswith(("|", "!["))]
    assert not tables


def test_the_sections_that_ran_with_amx_are_named() -> None:
    (named,) = re.findall(r"^- With AMX: (.*)\.$", TEXT, re.MULTILINE)
    with_amx = {entry.name for entry in CATALOGUE if "amx_tile" in entry.read().machine.features}
    sections = [section for section in re.split(r"^## ", TEXT, flags=re.MULTILINE) if with_amx & set(names_in(section))]
    links = [f"[{title}](#{title.lower().replace(' ', '-')})" for title in (one.partition("\n")[0] for one in sections)]
    assert named == ", ".join(links)
    assert all(set(names_in(section)) <= with_amx for section in sections)


def test_every_machine_but_the_accelerators_has_two_cores() -> None:
    larger = {entry.name for entry in CATALOGUE if entry.read().machine.cores != 2}
    assert larger == {"device_copies", "device_tokens"}


def test_every_plot_that_is_named_exists_and_no_other() -> None:
    named = {DOCUMENT.parent / path for path in re.findall(r"\]\((plots/\w+\.svg)\)", TEXT)}
    assert named == set((DOCUMENT.parent / "plots").iterdir())


@pytest.mark.parametrize("entry", CATALOGUE, ids=by_name)
def test_a_plot_shows_the_committed_results(entry: Entry) -> None:
    plot = entry.plot_path.read_text()
    assert entry.source in plot, "run: make plots"
    texts = "".join(ET.fromstring(plot).itertext())
    assert entry.read().machine.kernel in texts, "the machine is in the caption"


@pytest.mark.parametrize("entry", CATALOGUE, ids=by_name)
def test_drawing_again_makes_no_difference(entry: Entry) -> None:
    assert entry.plot() == entry.plot()


@pytest.mark.parametrize("entry", CATALOGUE, ids=by_name)
def test_a_result_was_made_by_the_command_that_renews_it(entry: Entry) -> None:
    command = shlex.split(entry.read().command)
    assert command == ["python", "-m", *arguments_of(entry.name)]


def test_the_commands_of_the_document_exist() -> None:
    for target in re.findall(r"[`$] ?make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for module in re.findall(r"python -m benchmarks\.(\w+)", TEXT):
        assert (ROOT / "benchmarks" / f"{module}.py").is_file()


def test_processor_times_are_shown_beside_the_plain_loop_if_the_results_have_them() -> None:
    results = read(RESULTS_FOLDER / "backends.json", Backends).results
    title = "CPU seconds per GiB (ratio to the plain loop)"
    older = [row.model_copy(update={"plain_cpu_ratio": None}) for row in results.speed]
    assert title not in tables.backends(results.model_copy(update={"speed": older}))
    newer = [row.model_copy(update={"cpu_seconds_per_gib": 0.25, "plain_cpu_ratio": 1.25}) for row in results.speed]
    shown = tables.backends(results.model_copy(update={"speed": newer}))
    assert f"| {title} | store, 1 thread | load, 1 thread | store, 4 threads | load, 4 threads |" in shown
    assert "| disk, page cache, pages of 2 MiB | 0.250 (1.25) | 0.250 (1.25) | 0.250 (1.25) | 0.250 (1.25) |" in shown


def test_loads_that_are_not_compared_are_shown_and_drawn() -> None:
    results = read(RESULTS_FOLDER / "lmcache_connector.json", LMCacheConnector).results
    rows = [row.model_copy(update={"speed_beside_lmcache": None}) for row in results.first_tokens]
    assert [row.name for row in rows if row.is_ours] == ["offload-core's tier"] * 2
    changed = results.model_copy(update={"first_tokens": rows})
    shown = [line for line in tables.lmcache_connector(changed).splitlines() if "offload-core's tier" in line]
    assert [line.rsplit("| ", 1)[1] for line in shown] == ["- |"] * 2
    assert findings.lmcache_connector(changed) == (
        "Loads by our tier from an LMCache server are too short here for a comparison with LMCache's connector"
    )
    drawings.lmcache_connector(Figure(), changed)


@pytest.fixture(scope="module")
def codecs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "codecs.json"
    command = ["-m", "benchmarks.codecs", "--payload-mib", "0.1", "--levels", "1", "--seconds", "0.001"]
    subprocess.run([sys.executable, *command, "--json", str(path)], cwd=ROOT, check=True, capture_output=True)
    return path


def test_a_benchmark_writes_a_document_that_can_be_read(codecs_file: Path) -> None:
    document = read(codecs_file, Codecs)
    assert document.command.startswith("python -m benchmarks.codecs --payload-mib 0.1 ")
    assert document.parameters == {"payload_mib": 0.1, "levels": "1", "seconds": 0.001}
    assert {row.codec for row in document.results.compression} == {"zstd", "zstd-planes", "split, both"}
    assert document.machine.cores >= 1
    assert document.machine.memory_gib > 0
    assert {"torch", "offload-core"} <= set(document.machine.versions)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, rf"schema_version is {SCHEMA_VERSION + 1}, this version reads"),
        ({"benchmark": "ttft"}, "results of 'ttft', not of 'codecs'"),
        ({"results": {"zstd_version": "1", "payload_bytes": 1}}, r"results\.compression\s+Field required"),
        ({"colour": "blue"}, r"colour\s+Extra inputs are not permitted"),
    ],
)
def test_a_document_of_another_version_is_refused_with_the_reason_and_the_cure(
    codecs_file: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(json.loads(codecs_file.read_text()) | change))
    with pytest.raises(UnreadableResultsError, match=reason) as caught:
        read(path, Codecs)
    assert f"{path}: " in str(caught.value)
    assert f"renew it: python -m benchmarks.codecs … --json {path}" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_file_that_is_no_document_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    with pytest.raises(UnreadableResultsError, match="No such file"):
        read(path, DiskScan)
    path.write_text(content)
    with pytest.raises(UnreadableResultsError, match="renew it"):
        read(path, DiskScan)
