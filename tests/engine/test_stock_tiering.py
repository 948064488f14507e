"""A real engine with vLLM's own connector and tiering, and our tiers below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import Lab, count, served
from tests.support.engine.spec import Round, compare


@pytest.mark.long
def test_a_new_engine_is_served_from_our_tier_by_vllms_own_connector(mistral: Lab, tmp_path: Path) -> None:
    tier = {
        "type": "OffloadCoreTier",
        "module_path": "offload_core.elsewhere.vllm_tiering",
        "io_process": "off",
        "backends": [{"name": "disk", "type": "disk", "path": str(tmp_path / "kv")}],
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.support.engine.stock_tiering_spec",
            "cpu_bytes_to_use": 256 << 20,
            "secondary_tiers": [tier],
        },
    }
    rounds = [Round(name="prompts", prompts=mistral.prompts(700, 1283, family=20))]
    first = mistral.run(rounds, transfer)
    second = mistral.run(rounds, transfer)
    plain = mistral.reference(rounds)
    assert compare(plain, first) == []
    assert compare(plain, second) == []
    assert not any(served(first).values())
    assert all(served(second).values())
    assert count(second, "load_hits") > 0
