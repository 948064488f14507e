"""The geometry file that an engine writes holds its plan: every geometry is compared with the objects on disk."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path

import pytest

from offload_core.cli.plan_report import plan_report
from offload_core.config.geometry_file import KVCacheGeometry, load_geometry
from offload_core.vllm.model.groups import build_planner
from offload_core.vllm.worker import geometry_export as geometry_file
from tests.standin.rig import Rig
from tests.support.standin.geometries import MODELS


def wait_until_written() -> None:
    for thread in threading.enumerate():
        if thread.name == "offload-geometry":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_from_the_file_is_that_of_the_engine(rig: Rig, tmp_path: Path, name: str, ranks: int) -> None:
    model = MODELS[name]()
    engine = rig.engine(model, ranks=ranks, geometry_file=tmp_path / "geometry.json")
    wait_until_written()
    tokens = 2 * model.chunk_tokens
    rig.run(engine, [3 + i % 997 for i in range(tokens + 5)])
    planner = build_planner(engine.vllm_config, engine.kv_cache_config, model.hybrid_chunk_size)
    rig.end(engine)

    geometry = load_geometry(tmp_path / "geometry.json")

    assert geometry.planner(geometry.hybrid_chunk_size) == planner
    assert geometry.ranks == ranks
    report = plan_report(geometry, geometry.hybrid_chunk_size, prompt_tokens=tokens)
    assert report.prompt_tokens == tokens
    objects = [(path.parent.parent.name, path.stat().st_size) for path in rig.kv.rglob("*.kv")]
    assert set(objects) == {(pack.name, pack.object_bytes) for pack in report.packs}
    counts = Counter(pack for pack, _ in objects)
    for pack in report.packs:
        expected = pack.objects_per_1000_tokens * report.prompt_tokens / 1000
        if pack.name.startswith("state"):
            assert ranks <= counts[pack.name] <= expected
        else:
            assert counts[pack.name] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_the_plan_of_an_engine_with_tails_has_their_bytes(rig: Rig, tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    unit = model.chunk_tokens // 4
    engine = rig.engine(model, geometry_file=tmp_path / "geometry.json", prefix_match_unit=unit)
    wait_until_written()
    rig.run(engine, [3 + i % 997 for i in range(model.chunk_tokens + 2 * unit + 5)])
    planner = build_planner(engine.vllm_config, engine.kv_cache_config, model.hybrid_chunk_size)
    rig.end(engine)

    geometry = load_geometry(tmp_path / "geometry.json")

    assert geometry.planner(geometry.hybrid_chunk_size) == planner
    report = plan_report(geometry, geometry.hybrid_chunk_size)
    tails = [path.stat().st_size for path in rig.kv.rglob("*.kv") if path.parent.parent.name.endswith("-tail")]
    assert (report.tail_objects, report.tail_bytes) == (len(tails), sum(tails))
    assert tails, "the engine stores tails"


def test_a_file_that_cannot_be_written_is_a_warning(rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["gpt_oss"]()
    with caplog.at_level(logging.WARNING, geometry_file.__name__):
        engine = rig.engine(model, geometry_file=tmp_path / "absent" / "geometry.json")
        wait_until_written()
    assert [record.levelname for record in caplog.records if record.name == geometry_file.__name__] == ["WARNING"]
    assert f"geometry_file: '{tmp_path / 'absent' / 'geometry.json'}' could not be written" in caplog.text
    (request,) = rig.run(engine, [3] * 20)
    assert len(engine.outputs[request]) == 4


def test_a_disk_that_hangs_holds_no_engine_up(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(geometry: KVCacheGeometry, path: Path) -> None:
        hangs.set()
        assert released.wait(20), "the engine waits for the disk"

    monkeypatch.setattr(geometry_file, "save_geometry", hang)
    engine = rig.engine(MODELS["gpt_oss"](), geometry_file=tmp_path / "geometry.json")
    assert hangs.wait(30)
    (request,) = rig.run(engine, [3] * 20)
    assert len(engine.outputs[request]) == 4
    released.set()
    wait_until_written()
