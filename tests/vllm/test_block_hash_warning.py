"""Block hashes that others can forge, or that no other process makes, are one warning with the cure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.vllm.model.refusals import block_hash_problem

pytestmark = pytest.mark.every_version

FORGED = "which is not cryptographic: a user can craft a prompt with the block hashes of another one"
NOT_SHARED = "PYTHONHASHSEED is not set"


@pytest.mark.parametrize(
    ("algorithm", "seed", "reasons"),
    [
        ("sha256", None, []),
        ("sha256_cbor", None, []),
        ("sha256", "0", []),
        ("xxhash", "0", [FORGED]),
        ("xxhash_cbor", "0", [FORGED]),
        ("builtin", "0", [FORGED]),
        ("xxhash", None, [FORGED, NOT_SHARED]),
    ],
)
def test_block_hashes_that_are_not_safe(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None, reasons: list[str]
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    engine: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    problem = block_hash_problem(engine) or ""
    assert [reason for reason in (FORGED, NOT_SHARED) if reason in problem] == reasons
    assert problem.endswith("use --prefix-caching-hash-algo sha256" if reasons else "")
    assert "\n" not in problem
