"""An L2 adapter of LMCache: all our tiers behind LMCache's own memory tier (LMCache 0.5.6).

::

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type": "plugin",
      "module_path": "offload_core.elsewhere.lmcache_l2", "class_name": "OffloadCoreL2Adapter",
      "adapter_params": {"config_file": "offload.yaml"}}'

LMCache decides which chunks are stored, and how deep a hit is. Any thread may call any method. Only ``close`` waits.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc
from lmcache.v1.distributed.api import ObjectKey as LMCacheKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.elsewhere.host_copier import PlaceParts
from offload_core.elsewhere.host_store import HostStore
from offload_core.elsewhere.jobs.host_jobs import EndedJob, PlacedObject
from offload_core.elsewhere.lmcache_results import TaskResults
from offload_core.elsewhere.locked_keys import LockedKeys
from offload_core.elsewhere.stored_keys import StoredKeys
from offload_core.objects.fingerprint import fingerprint
from offload_core.objects.format import FORMAT_VERSION

logger = logging.getLogger(__name__)

_PACK = "lmcache-g"
_DELETE_OBJECTS = 256
"""Maximum number of objects in one deletion."""
_STORED_KEYS = 1_000_000
"""Number of stored keys that the accounts and the listing know."""


@dataclass(frozen=True)
class _Job:
    """A store or a load under way.

    Args:
        objects: LMCache's memory, kept until the end of the job.
        placed: per key, our object; ``None`` for a key that is not moved.
    """

    is_load: bool
    keys: tuple[LMCacheKey, ...]
    objects: tuple[MemoryObj, ...]
    placed: tuple[PlacedObject | None, ...]


class OffloadCoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # mypy does not follow LMCache's imports
    """All tiers of one configuration, as one L2 adapter of LMCache.

    Args:
        config: LMCache's ``adapter_params``: the configuration's keys, or the ``config_file`` that has them.
        l1_memory_desc: LMCache's memory, of which only the places of objects are used.

    Raises:
        ConfigError: the configuration is wrong, a tier cannot be opened, or ``model_identity`` is missing.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        loaded = load_config(config, source="adapter_params")
        if loaded.settings.model_identity is None:
            raise ConfigError(
                [
                    "model_identity is missing: LMCache gives an adapter the names of models only, so new weights "
                    "under an old name would be served the old cache; set model_identity to a text that changes with "
                    "the weights of any model, and with the type of its KV cache"
                ]
            )
        identity = loaded.settings.model_identity
        self._namespace = lru_cache(maxsize=65_536)(
            lambda model, rank, salt: fingerprint(_identity(model, rank, salt, identity))
        )
        # A chunk that a write policy declines is no fault of a tier, and LMCache logs each key of a failed store.
        self._declines = all(tier.common.write_policy != "every" for tier in loaded.tiers)
        self._stores: TaskResults[L2StoreResult] = TaskResults()
        self._lookups: TaskResults[Bitmap] = TaskResults()
        self._loads: TaskResults[Bitmap] = TaskResults()
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._places: dict[int, PlaceParts] = {}
        self._locked = LockedKeys()
        self._stored: StoredKeys[LMCacheKey] = StoredKeys(_STORED_KEYS)
        self._counts: dict[str, dict[str, float]] = {tier.common.name: {} for tier in loaded.tiers}
        self._counts_lock = threading.Lock()
        self._is_closed = False
        self._store = HostStore(loaded, f"lmcache-{uuid.uuid4().hex}", {}, self._places.__getitem__, self._job_ended)

    def get_store_event_fd(self) -> int:
        """Return the descriptor that becomes readable with each result of a store."""
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that becomes readable with each result of a lookup."""
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        """Return the descriptor that becomes readable with each result of a load."""
        return self._loads.event_fd

    def submit_store_task(self, keys: list[LMCacheKey], objects: list[MemoryObj]) -> int:
        """Start a store of chunks. Their memory must stay until its result."""
        task, job = self._begin(keys, objects, is_load=False)
        self._store.store(task, [placed for placed in job.placed if placed is not None])
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of stores since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[LMCacheKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Ask for chunks, and lock those that a tier has. A tier without an answer at its deadline has none."""
        task = next(self._numbers)
        named = [(index, ours) for index, key in enumerate(keys) if (ours := self._key(key)) is not None]

        def answered(found: Future[list[str | None]]) -> None:
            bitmap = Bitmap(len(keys))
            hits = []
            for (index, ours), tier in zip(named, _result(found, len(named)), strict=True):
                if tier is not None:
                    bitmap.set(index)
                    hits.append((ours, tier))
            self._locked.add(hits)
            self._lookups.put(task, bitmap)
            if hits and not self._is_closed:
                self._store.touch(list(dict.fromkeys(key for key, _ in reversed(hits))))  # a prefix loses its end first

        self._locate([ours for _, ours in named]).add_done_callback(answered)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a lookup once; ``None`` if there is none yet."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[LMCacheKey]) -> None:
        """Unlock chunks. LMCache may delete them then; until then a deletion leaves them out."""
        self._locked.remove(key for key in map(self._key, keys) if key is not None)

    def submit_load_task(self, keys: list[LMCacheKey], objects: list[MemoryObj]) -> int:
        """Start a load of chunks into ``objects``. Their memory must stay until its result."""
        task, job = self._begin(keys, objects, is_load=True)
        placed = [one for one in job.placed if one is not None]
        tiers = [self._locked.tier_of(one.key) for one in placed]
        unknown = [one.key for one, tier in zip(placed, tiers, strict=True) if tier is None]
        if not unknown:
            self._store.load(task, placed, tiers)
            return task

        def answered(found: Future[list[str | None]]) -> None:
            answers = iter(_result(found, len(unknown)))
            self._store.load(task, placed, [next(answers) if tier is None else tier for tier in tiers])

        self._locate(unknown).add_done_callback(answered)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a load once; ``None`` if there is none yet."""
        return self._loads.take(task_id)

    def delete(self, keys: list[LMCacheKey]) -> None:
        """Start a deletion of chunks from all tiers, and leave locked ones out. Listeners are told at its end."""
        if self._is_closed:
            return
        wanted = [(key, ours) for key in keys if (ours := self._key(key)) is not None and not self._locked.has(ours)]
        for start in range(0, len(wanted), _DELETE_OBJECTS):
            part = wanted[start : start + _DELETE_OBJECTS]
            theirs = [key for key, _ in part]

            def ended(gone: Future[bool], theirs: list[LMCacheKey] = theirs) -> None:
                if not gone.cancelled() and not gone.exception() and gone.result():
                    self._notify_keys_deleted(theirs, self._stored.remove(theirs))

            self._store.delete([ours for _, ours in part]).add_done_callback(ended)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Return a page of the chunks that this server has stored. Those of earlier runs and of others are not listed.

        Raises:
            ValueError: the page's size is not positive, or the cursor is none of ours.
        """
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        if cursor is not None and cursor.count("@") != 4:
            raise ValueError(f"{cursor!r} is no cursor of a page; pass the next_page_token of the page before")
        found = self._stored.page(
            page_size + 1, cursor, _name, lambda key: model_name is None or key.model_name == model_name
        )
        page = found[:page_size]
        entries = tuple(KeyEntry(key.to_encoded_object_key(), nbytes) for key, nbytes in page)
        return KeyListPage(entries, _name(page[-1][0]) if len(found) > page_size else None)

    def report_status(self) -> dict[str, Any]:
        """Return the adapter's health and, per tier, whether it is in use and its counts since the start."""
        with self._counts_lock:
            for (name, tier), count in self._store.counters.take().items():
                counts = self._counts.setdefault(tier, {})
                counts[name] = counts.get(name, 0) + count
            counted = {tier: dict(counts) for tier, counts in self._counts.items()}
        available = {tier.name: tier.health.available for tier in self._store.tiers}
        return {
            "is_healthy": self._store.is_running and any(available.values()),
            "type": type(self).__name__,
            "tiers": {name: {"available": is_used, **counted[name]} for name, is_used in available.items()},
        }

    def close(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and close the tiers. Idempotent."""
        self._is_closed = True
        self._store.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def _key(self, key: LMCacheKey) -> ObjectKey | None:
        """Return the name of a chunk; ``None`` if it has a hash that no object can have."""
        if not 1 <= len(key.chunk_hash) <= 64:
            return None
        namespace = self._namespace(key.model_name, key.kv_rank, key.cache_salt)
        return ObjectKey(namespace, f"{_PACK}{key.object_group_id}", key.chunk_hash)

    def _locate(self, keys: Sequence[ObjectKey]) -> Future[list[str | None]]:
        if not self._is_closed:
            return self._store.locate(keys)
        nowhere: Future[list[str | None]] = Future()
        nowhere.set_result([None] * len(keys))
        return nowhere

    def _begin(self, keys: Sequence[LMCacheKey], objects: Sequence[MemoryObj], *, is_load: bool) -> tuple[int, _Job]:
        """Note a new job, with a place for each chunk that can be moved. A load moves no chunk twice."""
        placed: list[PlacedObject | None] = []
        moved: set[ObjectKey] = set()
        for key, memory in zip(keys, objects, strict=True):
            ours = self._key(key)
            view = None if ours is None or (is_load and ours in moved) else _bytes_of(memory)
            if ours is None or not view:
                placed.append(None)
                continue
            moved.add(ours)
            place = next(self._numbers)
            self._places[place] = (view,)
            placed.append(PlacedObject(ours, place, len(view)))
        task = next(self._numbers)
        job = self._jobs[task] = _Job(is_load, tuple(keys), tuple(objects), tuple(placed))
        return task, job

    def _job_ended(self, ended: EndedJob) -> None:
        job = self._jobs.pop(ended.job_id)
        for placed in ended.objects:
            del self._places[placed.place]
        moved = [index for index, placed in enumerate(job.placed) if placed is not None and placed.key in ended.moved]
        (self._load_ended if job.is_load else self._store_ended)(ended.job_id, job, moved)

    def _load_ended(self, task: int, job: _Job, loaded: Sequence[int]) -> None:
        bitmap = Bitmap(len(job.keys))
        for index in loaded:
            bitmap.set(index)
        failed = [placed.key for index, placed in enumerate(job.placed) if placed and not bitmap.test(index)]
        self._locked.doubt(failed)
        self._loads.put(task, bitmap)
        if loaded:
            self._notify_keys_accessed([job.keys[index] for index in loaded])

    def _store_ended(self, task: int, job: _Job, stored: Sequence[int]) -> None:
        sizes = [(job.keys[index], placed.nbytes or 0) for index in stored if (placed := job.placed[index]) is not None]
        success = len(stored) == len(job.keys) or self._declines
        new, forgotten = self._stored.add(sizes)
        self._stores.put(task, L2StoreResult(success, sum(nbytes for _, nbytes in sizes)))
        if forgotten:  # first, since a key with another size than before is in both lists
            self._notify_keys_deleted([key for key, _ in forgotten], [nbytes for _, nbytes in forgotten])
        if new:
            self._notify_keys_stored([key for key, _ in new], [nbytes for _, nbytes in new])


def _identity(model: str, rank: int, salt: str, model_identity: str) -> dict[str, Any]:
    """Return the facts that decide a chunk's bytes, beside its hash and its group."""
    return {
        "format_version": FORMAT_VERSION,
        "engine": ["lmcache", version("lmcache"), "l2"],
        "model": {"name": model, "model_identity": model_identity},
        "kv_rank": rank,
        "cache_salt": salt,
    }


def _name(key: LMCacheKey) -> str:
    """Return a name of a key that sorts, and that no other key has: the fields of a key have no ``@``."""
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}@{key.cache_salt}"


def _bytes_of(memory: MemoryObj) -> memoryview | None:
    """Return the bytes of a chunk's memory; ``None`` if this process cannot reach them."""
    try:
        return memoryview(memory.byte_array).cast("B")
    except Exception:
        logger.warning("a %s has no bytes in this process's memory; it is not moved", type(memory), exc_info=True)
        return None


def _result(found: Future[list[str | None]], count: int) -> list[str | None]:
    return [None] * count if found.cancelled() or found.exception() else found.result()
