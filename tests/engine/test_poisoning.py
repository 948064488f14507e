"""A block that a load leaves as it was is seen: the tests' connector has filled it with a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import Lab, ours, served
from tests.support.engine.spec import compare


@pytest.mark.parametrize("fault", [None, "ForgetsFirstChunk", "ForgetsLastChunk"])
def test_chunk_that_is_not_loaded_changes_every_output(lab: Lab, stored: Path, fault: str | None) -> None:
    transfer = ours(stored)
    if fault is not None:
        transfer |= {"kv_connector": fault, "kv_connector_module_path": "tests.engine.forgetful"}
    result = lab.run(lab.standard(), transfer)
    assert all(served(result).values())
    assert len(compare(lab.alone(lab.standard()), result)) == (0 if fault is None else 3)
