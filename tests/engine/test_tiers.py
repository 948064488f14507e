"""Host memory above a disk: what a later process loads from the disk it keeps, and serves from memory from then on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import UNTIL_STORED, Lab, count, objects, ours, served
from tests.support.engine.spec import Round, compare


@pytest.mark.long
def test_what_was_loaded_from_disk_is_served_from_memory_the_next_time(gemma3: Lab, tmp_path: Path) -> None:
    prompts = gemma3.prompts(700, 1283, family=6)
    first_rounds = [Round(name="stored", prompts=prompts)]
    rounds = [
        Round(name="from disk", prompts=prompts),
        Round(name="other work", prompts=gemma3.prompts(500, family=7)),
        Round(name="from memory", prompts=prompts, reset_prefix_cache_before=True),
    ]
    backends = [
        {"name": "ram", "type": "cpu", "capacity": "256MiB"},
        {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")},
    ]
    transfer = ours(tmp_path / "kv", hybrid_chunk_size=gemma3.block_size, backends=backends)

    first = gemma3.run(first_rounds, transfer, extra_engine_args=UNTIL_STORED)
    second = gemma3.run(rounds, transfer, extra_engine_args=UNTIL_STORED)

    assert compare(gemma3.reference(rounds), second) == []
    assert count(first, "stores", "ram") == count(first, "stores", "disk") > 0
    from_disk, from_memory = served(second, 0), served(second, 2)
    assert from_disk == from_memory
    assert all(tokens > 600 for tokens in from_memory.values())
    loaded = count(second, "load_hits", "disk")
    assert 0 < loaded == count(second, "promotions", "ram") == count(second, "load_hits", "ram")
    assert count(second, "promotions_dropped", "ram") == count(second, "load_missing", "ram") == 0
    assert count(second, "stores", "ram") == loaded + count(second, "stores", "disk")
    assert len(objects(tmp_path / "kv")) == count(first, "stores", "disk") + count(second, "stores", "disk")
