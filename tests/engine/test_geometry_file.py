"""``offload-core plan`` on the file that an engine has written shows what that engine has stored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from offload_core.config.geometry_file import load_geometry
from tests.support.engine.lab import Lab, objects, ours
from tests.support.engine.spec import Round

COMMAND = Path(sys.executable).with_name("offload-core")


@pytest.mark.every_version
def test_the_plan_of_a_saved_geometry_is_that_of_the_engine(lab: Lab, tmp_path: Path) -> None:
    transfer = ours(tmp_path / "kv", geometry_file=str(tmp_path / "geometry.json"))
    tokens = 8 * lab.block_size
    rounds = [Round(name="prompt", prompts=lab.prompts(tokens + 5))]

    result = lab.run(rounds, transfer)

    groups = {group.index: group for group in load_geometry(tmp_path / "geometry.json").groups}
    for index, fact in enumerate(result.engine["kv_cache_groups"]):
        assert groups[index].block_size_tokens == fact["block_size"]
        assert sum(pages.count for pages in groups[index].pages) == len(fact["layers"])
        assert groups[index].name.startswith(fact["layers"][0])
    command = [str(COMMAND), "plan", str(tmp_path / "geometry.json"), "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (plan,) = json.loads(printed)["plans"]
    stored = [(path.parent.parent.name, path.stat().st_size) for path in objects(tmp_path / "kv")]
    assert set(stored) == {(pack["name"], pack["object_bytes"]) for pack in plan["packs"]}
    counts = Counter(name for name, _ in stored)
    for pack in plan["packs"]:
        expected = pack["objects_per_1000_tokens"] * tokens / 1000
        if pack["name"].startswith("state"):  # of those at which no step has ended there is none
            assert 1 <= counts[pack["name"]] <= expected
        else:
            assert counts[pack["name"]] == pytest.approx(expected)
