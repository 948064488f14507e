"""A folder with a limit whose account is lost is scanned at the next start; no request waits for that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api.keys import ObjectKey
from tests.support.engine.lab import Lab, count, objects, ours, served
from tests.support.engine.spec import Round, compare, logged_problems

pytestmark = pytest.mark.long

FOREIGN_OBJECTS = 50_000


def test_the_first_request_is_served_while_many_objects_are_counted(gemma3: Lab, tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    # Shorter than elsewhere in these tests: a lookup that had to wait for the scan would be a miss.
    transfer = ours(kv, lookup_timeout_seconds=2, load_timeout_seconds=5)
    transfer["kv_connector_extra_config"]["backends"][0]["capacity"] = "1GiB"
    rounds = [Round(name="prompts", prompts=gemma3.prompts(2500, 1283, 700, family=75))]
    gemma3.run(rounds, transfer)
    own = len(objects(kv))
    _add_foreign_objects(kv)
    shutil.rmtree(kv / STATE_FOLDER)

    lines: list[str] = []
    result = gemma3.run(rounds, transfer, on_line=lines.append)

    assert compare(gemma3.reference(rounds), result) == []
    assert all(served(result).values())
    assert served(result)["family75-2500"] == 2500 // 256 * 256
    assert count(result, "lookup_failures") == count(result, "load_timeouts") == count(result, "load_failures") == 0
    assert logged_problems(lines) == []
    assert len(objects(kv)) == own + FOREIGN_OBJECTS


def _add_foreign_objects(kv: Path) -> None:
    """Objects of one byte, of another model."""
    layout = Layout(kv)
    for number in range(FOREIGN_OBJECTS):
        digest = bytes([number % 256]) + number.to_bytes(31, "big")
        path = layout.path(ObjectKey("cd" * 32, "full-u256", digest))
        if number < 256:
            path.parent.mkdir(parents=True)
        path.write_bytes(b"\0")
