"""Who is offloaded: requests that opt out, and prompts without what was generated."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine.lab import Lab, objects, ours
from tests.support.engine.spec import RunResult
from tests.support.workload import Workload, WorkloadRequest


def _run(lab: Lab, folder: Path, requests: list[WorkloadRequest], **config: bool) -> RunResult:
    transfer = ours(folder, hybrid_chunk_size=lab.block_size, **config)
    return lab.run([], transfer, workloads=[Workload(name="requests", requests=requests)])


def _requests(lab: Lab, wishes: dict[str, bool] | None = None, max_tokens: int = 4) -> list[WorkloadRequest]:
    (prompt,) = lab.prompts(700, family=50)
    params = {"hybrid_offload": wishes} if wishes is not None else None
    return [
        WorkloadRequest(
            name="request", token_ids=prompt.token_ids, max_tokens=max_tokens, kv_transfer_params=params, arrival_step=0
        )
    ]


def test_requests_opt_out_of_storing_and_of_loading(gemma3: Lab, tmp_path: Path) -> None:
    wishes: dict[str, dict[str, bool] | None] = {
        "stores nothing": {"store": False},
        "finds nothing and stores": None,
        "finds what there is": None,
        "does not look": {"load": False},
    }
    workloads = [Workload(name=name, requests=_requests(gemma3, wish)) for name, wish in wishes.items()]
    result = gemma3.run([], ours(tmp_path / "kv", hybrid_chunk_size=gemma3.block_size), workloads=workloads)

    loaded = {workload.name: workload.requests[0].external_cached_tokens for workload in result.workloads}
    assert loaded == dict.fromkeys(wishes, 0) | {"finds what there is": 5 * gemma3.block_size}
    assert objects(tmp_path / "kv")


def test_generated_tokens_are_stored_unless_the_prompt_only_is_asked_for(gemma3: Lab, tmp_path: Path) -> None:
    chunk = gemma3.block_size
    for prompt_only, chunks in ((True, 700 // chunk), (False, (700 + 200) // chunk)):
        folder = tmp_path / f"kv-{prompt_only}"
        _run(gemma3, folder, _requests(gemma3, max_tokens=201), offload_prompt_only=prompt_only)
        assert len([path for path in objects(folder) if "full" in path.parent.parent.name]) == chunks
