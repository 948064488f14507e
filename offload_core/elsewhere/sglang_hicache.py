"""A storage backend of SGLang's HiCache: all our tiers below SGLang's host memory (SGLang 0.5.23).

::

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-mem-layout page_first
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "offload-core",
      "module_path": "offload_core.elsewhere.sglang_hicache", "class_name": "OffloadCoreHiCache", "interface_v1": 1,
      "config_file": "offload.yaml"}'

SGLang decides which pages are stored, and how deep a hit is. Its own I/O threads call, and wait for each result. The
deadlines of the tiers bound every wait, and an error is a miss.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.elsewhere.host_pages import HostPages, Page, tensor_page
from offload_core.elsewhere.waiting_calls import Place, WaitingCalls
from offload_core.memory.staging_size import smallest_pool_bytes
from offload_core.objects.fingerprint import Json, fingerprint
from offload_core.objects.format import FORMAT_VERSION

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PACK = "sglang-"
_KV = PoolName.KV.value
_THEIR_KEYS = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size", "prefetch_threshold",
        "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip
"""The keys of the extra configuration that SGLang reads."""


class _Pool:
    """A registered pool: its pages, and the names of its objects."""

    def __init__(self, pages: HostPages, namespace: str) -> None:
        self.pages = pages
        self.namespace = namespace
        self.pack = _PACK + pages.name.replace("_", "-")

    def key(self, page: str) -> ObjectKey:
        return ObjectKey(self.namespace, self.pack, _hash(page))


class OffloadCoreHiCache(HiCacheStorage):  # type: ignore[misc]  # mypy does not follow SGLang's imports
    """All tiers of one configuration, as one storage backend of SGLang's HiCache. Any thread may call any method.

    Args:
        storage_config: SGLang's description of the model and of this rank. Its ``extra_config`` has the configuration's
            keys, or the ``config_file`` that has them, beside SGLang's own.
        kwargs: unused, like SGLang's other keyword arguments for backends.

    Raises:
        ConfigError: the configuration is wrong, a tier cannot be opened, or ``model_identity`` is missing.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        given = storage_config.extra_config or {}
        ours = {key: value for key, value in given.items() if key not in _THEIR_KEYS}
        loaded = load_config(ours, source="hicache-storage-backend-extra-config")
        if loaded.settings.model_identity is None:
            raise ConfigError(
                [
                    f"model_identity is missing: SGLang gives a backend the model's name {storage_config.model_name!r} "
                    "only, so new weights under this name would be served the old cache; set model_identity to a text "
                    "that changes with the weights"
                ]
            )
        self._identity = _identity(storage_config, loaded.settings.model_identity)
        self._rank = storage_config.tp_rank
        self._is_replicated = storage_config.is_mla_model
        self._is_zero_copy = bool(given.get("interface_v1", 0))
        self._staging_uses = loaded.settings.staging_uses
        # A page that a write policy declines is no fault of a tier, and SGLang gives the rest of its prefix up.
        self._declines = all(tier.common.write_policy != "every" for tier in loaded.tiers)
        self._pools: dict[str, _Pool] = {}
        self._calls = WaitingCalls(loaded, f"sglang-{uuid.uuid4().hex}")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the usual KV pages.

        Raises:
            ConfigError: the pool gives no pages, or they are too large for the staging memory.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host, flat=not self._is_zero_copy)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool of a hybrid model, as :meth:`register_mem_pool_host` does."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name(host_pool_name)
        self._register(name, host_pool, flat=name == _KV and not self._is_zero_copy)

    def exists(self, key: str) -> bool:
        """Return whether a tier has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of pages from the first one on that a tier has."""
        return _or_miss(lambda: self._kv_pages(keys, None), 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the depths at which every pool can be restored. One deadline bounds all questions together."""
        return _or_miss(lambda: self._restorable(keys, pool_transfers or []), PoolTransferResult(0, {}, []))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load a page into a tensor; returns the tensor, or ``None`` for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load pages into tensors; returns each tensor, or ``None`` for a miss."""
        tensors = _tensors(target_locations, len(keys))
        done = self._move(_KV, keys, lambda pool: _flat_pages(pool, tensors), self._calls.load)
        return [tensor if there else None for tensor, there in zip(tensors, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page from a tensor; returns whether a tier has it now."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages from tensors; returns whether tiers have all of them now."""
        tensors = _tensors(target_locations if values is None else values, len(keys))
        whole = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        return all(self._move(_KV, keys, lambda pool: _flat_pages(pool, whole), self._save))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool; returns which are loaded."""
        done = self._load_pages(_KV, keys, host_indices)
        self._touch_before(extra_info)
        return done

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from the host pool; returns which a tier has now."""
        done = self._save_pages(_KV, keys, host_indices)
        self._touch_before(extra_info)
        return done

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into the pools of a hybrid model; returns, per pool, which are loaded."""
        return {one.name: self._load_pages(_name(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages from the pools of a hybrid model; returns, per pool, which a tier has now."""
        return {one.name: self._save_pages(_name(one.name), one.keys or [], one.host_indices) for one in transfers}

    def clear(self) -> bool:
        """Delete the pages that this process has stored; returns whether they are gone at the deadline of a store."""
        is_clear = _or_miss(self._calls.clear, False)
        if not is_clear:
            logger.warning("not all pages are deleted yet; the rest may still be served")
        return is_clear

    def get_stats(self) -> None:
        """Return ``None``: our counters do not fit SGLang's metrics."""

    def close(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and close the tiers. Idempotent."""
        self._calls.close()

    def _register(self, name: str, host_pool: Any, *, flat: bool) -> None:
        pages = HostPages(name, host_pool, flat=flat)
        limit = self._calls.store.largest_payload_bytes
        if pages.page_bytes > limit:
            needed = smallest_pool_bytes(pages.page_bytes, self._staging_uses)
            raise ConfigError(
                [
                    f"staging_bytes is too small for the pages of SGLang's pool {name!r}: they have {pages.page_bytes} "
                    f"bytes, and at most {limit} fit; set it to {needed} or more"
                ]
            )
        # Ranks of a replicated model share the pages that have no heads: one of them writes, and all read.
        is_shared = self._is_replicated and name != PoolName.MAMBA.value and not pages.has_heads
        identity = {**self._identity, "tp_rank": None if is_shared else self._rank, "pool": pages.identity()}
        self._pools[name] = _Pool(pages, fingerprint(identity))

    def _kv_pages(self, keys: Sequence[str], until: float | None) -> int:
        pool = self._pools.get(_KV)
        if pool is None or pool.pages.is_logical:
            return 0
        names = [pool.key(key) for key in keys]
        there = _leading(self._calls.find(names, until))
        self._calls.touch(names[:there][::-1])  # a prefix loses its end first
        return there

    def _restorable(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        until = time.monotonic() + self._calls.lookup_seconds
        kv = self._pools.get(_KV)
        if kv is not None and kv.pages.is_logical:
            kv_pages = len(keys) if transfers else 0  # the other pools have all bytes
        else:
            kv_pages = self._kv_pages(keys, until)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        depths = set(range(1, kv_pages + 1))
        asked = [one for one in transfers if one.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)]
        present = self._pages_there(keys[:kv_pages], asked, until)
        for transfer, there in zip(asked, present, strict=True):
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                restorable = set(range(1, _leading(there) + 1))
            else:
                restorable = _window_ends(there, max(1, len(transfer.keys or ())))
            if restorable:
                hits[transfer.name] = max(restorable)
            depths &= restorable
        return PoolTransferResult(max(depths, default=0), hits, sorted(depths))

    def _touch_before(self, extra_info: HiCacheStorageExtraInfo | None) -> None:
        """Note a use of the pages before those of a call, if SGLang names them: a prefix loses its end first."""
        pool = self._pools.get(_KV)
        if pool is not None and extra_info is not None and extra_info.prefix_keys:
            self._calls.touch(list(dict.fromkeys(map(pool.key, reversed(extra_info.prefix_keys)))))

    def _pages_there(self, keys: Sequence[str], transfers: Sequence[PoolTransfer], until: float) -> list[list[bool]]:
        """Return, per transfer, which pages of its pool a tier has. All are asked for at once."""
        pools = [self._pools.get(_name(transfer.name)) for transfer in transfers]
        names = [pool.key(key) for pool in pools if pool is not None for key in keys]
        found = self._calls.find(names, until)
        self._calls.touch([name for name, there in zip(names, found, strict=True) if there][::-1])
        answers = iter(found)
        return [[pool is not None and next(answers) for _ in keys] for pool in pools]

    def _load_pages(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pages: list[Page] = []

        def places(pool: _Pool) -> list[Page]:
            pages.extend(pool.pages.loaded(host_indices, len(keys)))
            return list(pages)

        done = self._move(name, keys, places, self._calls.load)
        for index, page in enumerate(pages):
            if done[index]:
                done[index] = _or_miss(partial(_take_over, page), False)
        return done

    def _save_pages(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        return self._move(name, keys, lambda pool: list(pool.pages.stored(host_indices, len(keys))), self._save)

    def _save(self, places: Sequence[Place]) -> list[bool]:
        done = self._calls.save(places)
        return [True] * len(done) if self._declines else done

    def _move(
        self,
        name: str,
        keys: Sequence[str],
        pages_of: Callable[[_Pool], Sequence[Page | None]],
        move: Callable[[Sequence[Place]], list[bool]],
    ) -> list[bool]:
        """Move pages between a pool and the tiers; returns which are moved. No error leaves."""
        pool = self._pools.get(name)
        if pool is None:
            logger.error("SGLang has registered no pool %r; its pages are misses", name)
            return [False] * len(keys)
        if pool.pages.is_logical:
            return [True] * len(keys)

        def moved() -> list[bool]:
            pages = list(pages_of(pool))
            there = [index for index, page in enumerate(pages) if page is not None]
            places = [Place(pool.key(key), page.parts) for key, page in zip(keys, pages, strict=True) if page]
            done = dict(zip(there, move(places), strict=True))
            return [done.get(index, False) for index in range(len(keys))]

        return _or_miss(moved, [False] * len(keys))


def _identity(config: HiCacheStorageConfig, model_identity: str) -> dict[str, Json]:
    """Return the facts that decide a page's bytes, beside its pool and its hash.

    The rank of data parallelism is none of them: the same tokens have the same pages there.
    """
    return {
        "format_version": FORMAT_VERSION,
        "engine": ["sglang", version("sglang"), "hicache"],
        "model": {"name": config.model_name, "model_identity": model_identity},
        "parallel": {
            "tp_size": config.tp_size,
            "pp": [config.pp_rank, config.pp_size],
            "attn_cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [config.dcp_rank, config.dcp_size],
            "logical_page_size": config.logical_page_size,
        },
    }


def _hash(page: str) -> bytes:
    """Return the hash that names a page: SGLang's own, or that of a key of another form."""
    if len(page) == 64:
        try:
            digest = bytes.fromhex(page)
        except ValueError:
            digest = b""
        if digest.hex() == page:
            return digest
    return sha256(b"offload-core/sglang/" + page.encode("utf-8", "surrogatepass")).digest()


def _tensors(given: Any, count: int) -> list[Any]:
    return [*([] if given is None else given), *[None] * count][:count]


def _flat_pages(pool: _Pool, tensors: Iterable[Any]) -> list[Page | None]:
    """Return the memory of tensors that have flat pages of a pool.

    Raises:
        ValueError: the objects of the pool have another order of bytes.
    """
    if not pool.pages.is_flat:
        raise ValueError("with interface_v1 set to 1, SGLang moves pages with batch_get_v1 and batch_set_v1 only")
    return list(map(tensor_page, tensors))


def _take_over(page: Page) -> bool:
    if page.finish is not None:
        page.finish()
    return True


def _name(pool: Any) -> str:
    return str(getattr(pool, "value", pool))


def _leading(there: Iterable[bool]) -> int:
    """Return the number of leading ``True``."""
    count = 0
    for one in there:
        if not one:
            break
        count += 1
    return count


def _window_ends(there: Sequence[bool], width: int) -> set[int]:
    """Return the numbers of pages whose last ``width`` pages are all there, or all of them if they are fewer."""
    ends, run = set(), 0
    for end, one in enumerate(there, 1):
        run = run + 1 if one else 0
        if run >= min(width, end):
            ends.add(end)
    return ends


def _or_miss(call: Callable[[], T], miss: T) -> T:
    """Return a call's result; an error is logged, and a miss."""
    try:
        return call()
    except Exception:
        logger.exception("a call of SGLang's HiCache failed; it counts as a miss")
        return miss
