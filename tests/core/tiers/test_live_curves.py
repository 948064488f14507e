"""The live curves of tiers: which tiers have one, their gauges, and errors that end only the estimates."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offload_core.config.loading import load_config
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner
from offload_core.runtime.metrics import HIT_RATIO_GAUGES, Counters
from offload_core.simulation.hit_curve import HitCurve
from offload_core.tiers.live_curves import LiveCurves
from offload_core.tiers.tier import Tier
from tests.support.geometries import FULL

PLANNER = HybridOffloadPlanner.build(
    [GroupGeometry(0, 16, FULL)], hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16
)
MIB = 1 << 20


class Lab:
    """Live curves of a configuration, whose tiers are not opened."""

    def __init__(self, folder: Path, *backends: dict[str, Any], **settings: Any) -> None:
        written = [
            {"path": str(folder / tier["name"]), **tier} if tier["type"] == "disk" else tier for tier in backends
        ]
        config = load_config({"backends": written, **settings})
        self.counters = Counters()
        self._tiers = [Tier(tier, config.settings.limits, self.counters) for tier in config.tiers]
        self.curves = LiveCurves(config, PLANNER, self._tiers, self.counters)
        self._sums: Counter[tuple[str, str]] = Counter()

    def start(self, *ranks: int) -> None:
        """Begin; ``ranks`` has the bytes of one object on each rank."""
        self.curves.start([{"full-u16": nbytes} for nbytes in ranks])

    def add(self, family: int, chunks: int = 8, seen: int = 0) -> None:
        hashes = [bytes([family, chunk]) * 16 for chunk in range(chunks)]
        self.curves.add(hashes, 16 * chunks + 1, seen)

    def gauges(self) -> dict[tuple[str, str], float]:
        """The values that vLLM would show."""
        for key, change in self.counters.take().items():
            self._sums[key] += change  # type: ignore[assignment]
        return dict(self._sums)

    def ratios(self, tier: str) -> list[float]:
        return [self.gauges().get((gauge, tier), 0.0) for gauge in HIT_RATIO_GAUGES]


RAM = {"name": "ram", "type": "cpu", "capacity": "1MiB"}
DISK = {"name": "disk", "type": "disk", "capacity": "1MiB"}


def test_each_tier_with_a_capacity_has_a_curve(tmp_path: Path) -> None:
    lab = Lab(
        tmp_path,
        RAM,
        DISK,
        {"name": "unlimited", "type": "disk"},
        {**DISK, "name": "read-only", "write_policy": "never"},
    )
    lab.start(1000)
    assert {tier: value for (name, tier), value in lab.gauges().items() if name == "capacity_bytes"} == {
        "ram": MIB, "disk": MIB,
    }  # fmt: skip
    lab.add(1)
    lab.add(1, seen=8)
    share = 8 * 16 / (2 * (8 * 16 + 1))
    assert lab.ratios("ram") == pytest.approx([share] * 4)
    assert lab.ratios("unlimited") == [0.0] * 4
    assert lab.gauges()["estimated_prompt_tokens", "disk"] == 2 * 129


def test_everything_has_no_curve(tmp_path: Path) -> None:
    lab = Lab(tmp_path, RAM, placement="everything")
    lab.start(1000)
    lab.add(1)
    assert lab.gauges() == {}


@pytest.mark.parametrize("mode", ["engine", "off"])
def test_ranks_share_a_disk_and_memory_but_for_that_of_their_own_processes(tmp_path: Path, mode: str) -> None:
    lab = Lab(tmp_path, {**RAM, "capacity": "64KiB"}, {**DISK, "capacity": "64KiB"}, io_process=mode)
    lab.start(2000, 4000, 4000)  # at 1 x, 16 objects in memory of a rank, and 6 where they share it
    for _ in range(2):
        for family in range(2):
            lab.add(family, seen=8)
    if mode == "off":
        assert lab.ratios("ram")[1] > 0.45
    else:
        assert lab.ratios("ram") == lab.ratios("disk")
    assert lab.ratios("disk")[1] < 0.1
    assert lab.ratios("disk")[3] > 0.45


def test_without_sizes_there_is_no_estimate_and_later_ones_do_not_start_anew(tmp_path: Path) -> None:
    lab = Lab(tmp_path, RAM)
    lab.curves.start([])
    lab.curves.start([{}])
    lab.add(1)
    assert lab.gauges() == {}
    lab.start(1000)
    lab.add(1)
    lab.start(1000)
    lab.add(1, seen=8)
    assert lab.ratios("ram")[1] > 0.4


def test_after_a_reset_no_chunk_is_found(tmp_path: Path) -> None:
    lab = Lab(tmp_path, RAM)
    lab.start(1000)
    lab.add(1)
    lab.curves.reset()
    lab.add(1)
    assert lab.ratios("ram") == [0.0] * 4


def test_an_error_ends_the_estimates_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = Lab(tmp_path, RAM)
    lab.start(1000)

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(HitCurve, "serve", broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            lab.add(1)
    assert [record.message for record in caplog.records] == [
        "the live curve has failed; its gauges stay as they are, and the engine runs on"
    ]


def test_an_unknown_estimate_stays_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, RAM)
    lab.start(1000)
    monkeypatch.setattr(HitCurve, "hit_ratios", lambda _: [0.1, 0.2, 0.3, math.nan])
    for _ in range(3):
        lab.add(1)
    assert lab.ratios("ram") == pytest.approx([0.1, 0.2, 0.3, math.nan], nan_ok=True)
