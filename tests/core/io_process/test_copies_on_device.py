"""Stores of a KV cache on a device: the I/O process gets an object when its copy to host memory has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.border_rig import BorderRig
from tests.support.held_copier import HeldCopier, copier
from tests.support.plugin_site import Site
from tests.support.transfer_rig import SECONDS, item

PAGE_BYTES = 4096


@pytest.fixture
def rig(io: IoLoop, site: Site, tmp_path: Path) -> Iterator[BorderRig]:
    site.declare("commanded", "commanded = tests.core.io_process.commanded")
    rig = BorderRig(
        io,
        tmp_path,
        ["tier"],
        mode="engine",
        page_bytes=PAGE_BYTES,
        num_blocks=8,
        staging_bytes=64 * PAGE_BYTES,
        make_copier=HeldCopier,
    )
    yield rig
    copier(rig).let_go()
    rig.close()


def test_the_process_seals_and_stores_an_object_when_its_copy_has_ended(rig: BorderRig) -> None:
    stored = rig.kv_cache[1].clone()
    rig.engine.submit_stores([item(1, block=1)])
    assert not rig.engine.drain_stores(0.2), "the process has stored memory that was not filled yet"
    copier(rig).let_go()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True}
    rig.load(item(1, block=5), tier="tier")
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache[5], stored)
