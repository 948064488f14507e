"""Every difference between the supported versions of vLLM; no other module reads the version.

The fields of KV cache events differ too; :mod:`.kv_events.vllm_events` leaves out those that a version lacks.

It is imported before the rest of the adapter. On an older vLLM, the rest would fail with nothing but a missing name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import vllm

from offload_core.api.errors import PlanError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_Connector = TypeVar("_Connector")

_TESTED_RELEASES = ((0, 30), (0, 31), (0, 32), (0, 33))  # the releases that `make test-engines` runs
_TESTED = ", ".join(f"{major}.{minor}" for major, minor in _TESTED_RELEASES)


def _release() -> tuple[int, int]:
    """Return the installed release as (major, minor); ``(0, 0)`` for a build without a number."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


if (0, 0) < _release() < min(_TESTED_RELEASES):
    raise PlanError(
        f"vLLM {vllm.__version__} is too old: its connector interface does not support hybrid models; "
        f"install one of the tested versions: {_TESTED}"
    )


def version_problem() -> str | None:
    """Return a warning for an untested version, ``None`` for a tested one."""
    if _release() in _TESTED_RELEASES:
        return None
    return (
        f"vLLM {vllm.__version__} is not among the tested versions ({_TESTED}); if it fails, or its outputs differ "
        "from those without offloading, install a tested version and report the difference"
    )


def sleep_problem(vllm_config: VllmConfig) -> str | None:
    """Return a warning if the engine may sleep and does not tell connectors, as before 0.33."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if not vllm_config.model_config.enable_sleep_mode or hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return None
    return (
        f"sleep mode is on, but vLLM {vllm.__version__} does not tell connectors when the KV cache loses its memory; "
        "this is not tested. Use vLLM 0.33, or run without enable_sleep_mode"
    )


def cache_hit_source(medium: str | None) -> Any:
    """Return vLLM's name for the kind of medium that served a hit; 0.30 and 0.31 have no names and never ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    sources = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    return sources.get(medium or "", CacheHitSource.EXTERNAL_UNSPECIFIED)


def keep_state_at(request: Request, boundary_tokens: int) -> None:
    """Let the engine end a prefill step at a boundary and keep the recurrent state there, as at its own junctions.

    A version without this attribute keeps only the states that it chooses itself.
    """
    if getattr(request, "shared_prefix_boundary", boundary_tokens) < boundary_tokens:
        request.shared_prefix_boundary = boundary_tokens


def can_report_attention_alone(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether the engine can report the depth of full attention if it lacks the recurrent states there.

    This came with 0.32. It looks groups of one spec up together, so there must be one spec of recurrent groups and one
    of all others.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import MambaSpec

    if (0, 0) < _release() < (0, 32):
        return False
    if not hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"):
        return False
    if not hasattr(KVCacheManager, "get_computed_blocks_for_connector"):
        return False
    groups = kv_cache_config.kv_cache_groups
    specs = [groups[index].kv_cache_spec for index in kv_cache_config.prefix_cacheable_group_ids]
    recurrent = [spec for spec in specs if isinstance(spec, MambaSpec)]
    others = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    return all(spec == kind[0] for kind in (recurrent, others) for spec in kind)


def version_without_tails() -> str | None:
    """Return the installed version if a load that ends inside a block was not tested with it: any before 0.32."""
    return vllm.__version__ if (0, 0) < _release() < (0, 32) else None


def can_load_within_step() -> bool:
    """Return whether the engine makes loads before the step of their requests, if it is told so. This came with 0.32.

    Older versions were not tested.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    return not (0, 0) < _release() < (0, 32) and hasattr(SchedulerOutput, "has_sync_kv_loads")


def prefix_replay_tokens(spec: KVCacheSpec) -> int:
    """Return the number of a hit's tokens that the group computes again; 0.30 has no such groups."""
    return int(getattr(spec, "prefix_replay_tokens", 0))


def hisparse_in_use(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether a part of the KV cache belongs to HiSparse, which came after 0.30."""
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        return True
    return any(
        getattr(group, "host_resident", False)
        or not getattr(group, "enable_kv_transfer", True)
        or getattr(getattr(group, "role", None), "name", "DEFAULT") != "DEFAULT"
        for group in kv_cache_config.kv_cache_groups
    )


def adapt_to_installed_vllm(connector: type[_Connector]) -> type[_Connector]:
    """Class decorator: return ``connector`` with the additions for the installed version of vLLM."""
    if _release() != (0, 30):
        return connector
    namespace = {"__module__": connector.__module__, "__doc__": connector.__doc__}
    adapted: type[_Connector] = type(connector.__name__, (_ConnectorFor030, connector), namespace)
    return adapted


class _ConnectorFor030:
    """Additions for vLLM 0.30; vLLM 0.31 and newer do the same themselves.

    * 0.30 does not call ``wait_for_save`` in a step without a forward pass; the stores of such a step would be lost.
    * 0.30 has one queue of waiting requests and stops at the first one that does not fit. A request whose load has
      ended holds blocks. Behind a request that needs these blocks, it would never run. So until it has run, all other
      requests are told to ask again: then the scheduler passes over them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saved = False
        self._loading_requests: set[str] = set()
        self._loaded_requests: set[str] = set()

    def wait_for_save(self) -> None:
        super().wait_for_save()  # type: ignore[misc]
        self._saved = True

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if not self._saved:
            super().wait_for_save()  # type: ignore[misc]
        self._saved = False
        return super().get_transfer_results(finished_req_ids)  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Any:
        self._loaded_requests.discard(request.request_id)  # its load has failed: it holds no blocks any more
        if self._loaded_requests:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loading_requests.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        ended = self._loading_requests & (connector_output.finished_recving or set())
        self._loading_requests -= ended
        self._loaded_requests |= ended
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        self._loaded_requests -= scheduler_output.num_scheduled_tokens.keys()
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Any:
        self._loading_requests.discard(request.request_id)
        self._loaded_requests.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
