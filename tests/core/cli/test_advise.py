"""``offload-core advise``: sentences on the capacity of tiers, from the metrics of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from tests.support.live_curves import Ratios, shown
from tests.support.metrics_page import served

GIB = 1 << 30
NAN = float("nan")

COUNTED = """
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 400.0 1700000000000
"""


def advise(*words: object, code: int = 0, text: str | None = None) -> Any:
    done = CliRunner().invoke(app, ["advise", *map(str, words)], input=text, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done


def advice(ratios: Ratios, **fields: Any) -> str:
    return str(advise("-", text=shown(ratios, **fields)).stdout)


def test_a_sentence_names_the_capacity_the_hits_and_the_advice() -> None:
    assert advice((0.48, 0.61, 0.701, 0.72)) == (
        "tier nvme: At 200.0 GiB, 61% of the prompt tokens can be hits. With half the capacity it would be 48%, with "
        "twice 70%, with four times 72%. More capacity pays: twice as much brings about 9 points more.\n"
    )


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        ((0.40, 0.50, 0.52, 0.58), "Twice the capacity brings little, but four times as much brings about 8 points"),
        ((0.40, 0.50, 0.51, 0.52), "The capacity fits: more brings little, and less costs hits."),
        ((0.50, 0.505, 0.51, 0.52), "Half the capacity would do."),
        ((0.0, 0.0, 0.0, 0.01), "The prompts share few prefixes, so no capacity brings many hits."),
        ((0.5, NAN, NAN, NAN), "too many different prompts for an estimate"),
        ((NAN, NAN, 0.5, 0.6), "too many different prompts for an estimate"),
        ((0.4, 0.5, NAN, NAN), "The hits with more capacity are unknown; use offload-core simulate."),
        ((0.5, 0.5, NAN, NAN), "The hits with more capacity are unknown; use offload-core simulate."),
        ((0.0, 0.01, NAN, NAN), "The hits with more capacity are unknown; use offload-core simulate."),
        ((0.4, 0.5, 0.51, NAN), "The hits with more capacity are unknown; use offload-core simulate."),
        ((0.4, 0.5, NAN, 0.6), "The hits with more capacity are unknown; use offload-core simulate."),
        ((0.4, 0.5, 0.6, NAN), "More capacity pays: twice as much brings about 10 points more."),
        ((NAN, 0.5, 0.51, 0.52), "More capacity brings little. The hits with less are unknown"),
        ((NAN, 0.5, 0.6, 0.6), "More capacity pays: twice as much brings about 10 points more."),
    ],
)
def test_the_advice_follows_the_curve(ratios: Ratios, sentence: str) -> None:
    assert sentence in advice(ratios)


def test_an_unknown_estimate_is_told() -> None:
    text = shown((0.4, 0.5, float("nan"), float("nan")))
    assert "with twice an unknown part, with four times an unknown part." in advise("-", text=text).stdout
    [tier] = json.loads(advise("-", "--json", text=text).stdout)["tiers"]
    assert tier["estimated_hit_ratio"] == {"half": 0.4, "same": 0.5, "twice": None, "four_times": None}


def test_before_the_first_prompt_there_is_no_advice() -> None:
    assert "No prompt has ended so far." in advice((0.0, 0.0, 0.0, 0.0), tokens=0)


def test_all_tiers_of_all_engines_are_told_and_the_hits_that_vllm_has_counted(tmp_path: Path) -> None:
    flat = (0.5, 0.5, 0.5, 0.5)
    text = shown(flat) + shown(flat, tier='sh"ared'.replace('"', '\\"')) + shown(flat, engine="1") + COUNTED
    path = tmp_path / "metrics.txt"
    path.write_text(text)
    lines = advise(path).stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "tier nvme", 'tier sh"ared', "tier nvme of engine 1", "vLLM has counted",
    ]  # fmt: skip
    assert lines[-1] == "vLLM has counted: 25% hits in its own cache, and 40% from tiers."
    document = json.loads(advise(path, "--json").stdout)
    assert document["measured"] == {"own_hit_ratio": 0.25, "external_hit_ratio": 0.4}
    assert document["tiers"][0] == {
        "engine": "0", "tier": "nvme", "capacity_bytes": 200 * GIB, "prompt_tokens": 5000,
        "estimated_hit_ratio": dict.fromkeys(("half", "same", "twice", "four_times"), 0.5),
        "advice": "Half the capacity would do.",
    }  # fmt: skip


@pytest.fixture
def address() -> Iterator[str]:
    with served(shown((0.1, 0.2, 0.3, 0.4))) as page:
        yield page.address


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_running_engine_is_asked(address: str, path: str) -> None:
    assert "At 200.0 GiB, 20% of the prompt tokens" in advise(address + path).stdout


def test_a_source_that_cannot_be_read_is_refused_with_the_cure(address: str, tmp_path: Path) -> None:
    cure = "give the address of a running vLLM, such as http://localhost:8000/metrics, a file with its answer, or -"
    empty = tmp_path / "empty.txt"
    empty.write_text("<html>\n")
    for source, reason in (
        (f"{address}/health", "HTTP Error 404: Not Found"),
        ("http://127.0.0.1:1/metrics", "cannot be read: "),
        ("http://[", "cannot be read: "),
        ("ftp://host/metrics", "ftp:// is not supported; only http:// and https:// are"),
        (tmp_path / "missing.txt", "No such file"),
        (empty, "has no metrics in the text format of Prometheus"),
    ):
        done = advise(source, "--json", code=2)
        assert reason in done.stderr
        assert cure in done.stderr
        assert cure in json.loads(done.stdout)["problems"][0]


def test_metrics_without_an_estimate_are_trouble() -> None:
    done = advise("-", code=1, text=COUNTED)
    assert (done.stdout, "no tier has an estimate" in done.stderr) == ("", True)
    assert json.loads(advise("-", "--json", code=1, text=COUNTED).stdout)["tiers"] == []
