"""A file system that is really full under a running engine: stores are counted as lost, everything else goes on."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from tests.backends.disk.conftest import tmpfs
from tests.support.engine.lab import Lab, count, objects, ours, served
from tests.support.engine.spec import Round, RunResult, compare, logged_problems

pytestmark = pytest.mark.long


def _lost(result: RunResult) -> int:
    return count(result, "store_failures") + count(result, "store_rejected")


@pytest.mark.parametrize("capacity", [None, "1GiB"], ids=["unlimited", "a limit beyond the file system's"])
def test_full_file_system_that_grows_again(lab: Lab, capacity: str | None) -> None:
    prompts = [
        *lab.prompts(1283, family=90), *lab.prompts(2500, family=91), *lab.prompts(2500, family=92),
        *lab.prompts(700, 1283, family=93), *lab.prompts(900, 2500, family=94),
    ]  # fmt: skip
    rounds = [
        Round(name="filling", prompts=prompts),
        Round(name="again", prompts=prompts, reset_prefix_cache_before=True),
        Round(name="room", prompts=prompts, reset_prefix_cache_before=True),
    ]
    finished = threading.Semaphore(0)
    with tmpfs("5m") as folder:
        transfer = ours(folder / "kv")
        if capacity is not None:
            transfer["kv_connector_extra_config"]["backends"][0]["capacity"] = capacity
        lines: list[str] = []

        def grow(fields: dict[str, Any]) -> None:
            finished.release()
            if (fields["round"], fields["name"]) == ("again", prompts[-1].name):
                subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)

        result = lab.run(rounds, transfer, on_progress=grow, on_line=lines.append)
        assert compare(lab.reference(rounds), result) == []
        assert _lost(result) > 0
        assert count(result, "load_failures") == count(result, "load_corrupt") == count(result, "load_timeouts") == 0
        assert served(result, 1)[prompts[0].name] > 0, "what had found room is served from the full file system"
        said = [line for line in logged_problems(lines) if not _expected(line)]
        assert said == []
        assert not list(folder.rglob("*.tmp")), "nothing torn is left"

        after: list[str] = []
        second = lab.run(rounds[:1], transfer, on_line=after.append)
        assert compare(lab.reference(rounds[:1]), second) == []
        assert all(served(second).values()), "with room again, all was stored"
        assert count(second, "load_corrupt") == _lost(second) == 0
        assert logged_problems(after) == []
        assert len(objects(folder / "kv")) >= count(result, "stores") > 0


def _expected(line: str) -> bool:
    """A full file system is told of once, by whichever part meets it first, and so is its end."""
    full = ("stores are rejected until the disk has free space", "No space left on device", "database or disk is full")
    return any(words in line for words in full) or line.endswith("works again")
