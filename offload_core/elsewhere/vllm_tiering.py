"""A secondary tier of vLLM's ``TieringOffloadingSpec``: all our tiers behind vLLM's own tiering (vLLM 0.32, 0.33).

::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers": [
            {"type": "OffloadCoreTier", "module_path": "offload_core.elsewhere.vllm_tiering",
             "config_file": "offload.yaml"}]}}

vLLM decides which chunks are stored and how deep a hit is. Every method runs on vLLM's scheduler thread, and only
``drain_jobs`` and ``shutdown`` wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.elsewhere.host_copier import PlaceParts
from offload_core.elsewhere.host_store import HostStore
from offload_core.elsewhere.jobs.host_jobs import EndedJob, PlacedObject
from offload_core.elsewhere.jobs.prompt_uses import PromptUses
from offload_core.elsewhere.verdicts import Verdicts
from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import Json, files_identity, fingerprint
from offload_core.objects.format import FORMAT_VERSION
from offload_core.runtime.metrics import BUCKET_SECONDS, COUNTERS, GAUGES, HISTOGRAMS, single_values

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

_PACK = "vllm-tiering-g"
_METRIC = "vllm:hybrid_offload_"


class OffloadCoreTier(SecondaryTierManager):  # type: ignore[misc]  # mypy does not follow vLLM's imports
    """All tiers of one configuration, as one secondary tier of vLLM.

    Args:
        enable_kv_events: report stored chunks as KV events, if vLLM publishes events.
        locality: ``LOCAL`` or ``REMOTE``, for vLLM's filters of tiers.
        config: the configuration's keys, or the ``config_file`` that has them.

    Raises:
        ConfigError: the configuration is wrong, a tier cannot be opened, or the model cannot be identified.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if enable_kv_events and publishes else None
        loaded = load_config(config)
        settings = loaded.settings
        chunk_bytes = self.block_size_bytes
        identity = _identity(offloading_spec, chunk_bytes, settings.model_identity)
        self._namespace = fingerprint(identity)
        # A chunk that a write policy declines is no fault of a tier, and must not count as back-pressure.
        self._declines = all(tier.common.write_policy != "every" for tier in loaded.tiers)
        groups = [group.group_id for group in offloading_spec.config.groups]
        packs = {f"{_PACK}{group}": chunk_bytes for group in groups}
        name = f"vllm-tiering-{offloading_spec.config.engine_id}"
        self._store = HostStore(loaded, name, packs, self._chunk)
        self._verdicts: Verdicts[OffloadKey] = Verdicts(self._find)
        self._uses: PromptUses[OffloadKey] = PromptUses()
        self._load_keys: dict[int, list[OffloadKey]] = {}
        self._store_keys: dict[int, list[OffloadKey]] = {}
        self._gauges: dict[tuple[str, str], float] = defaultdict(float)
        self._rows = primary_kv_view.cast("B")  # last: after an error, vLLM cannot close memory that has a view

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the answer about a chunk; ``RETRY`` until the tiers have given it, at the latest at their deadline."""
        verdict = self._verdicts.ask(key, req_context.req_id)
        if verdict.is_open:
            return LookupResult.RETRY
        return LookupResult.MISS if verdict.tier is None else LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start a store of chunks."""
        self._store_keys[job_metadata.job_id] = keys = list(job_metadata.keys)
        self._uses.job_begins(job_metadata.job_id, job_metadata.req_context.req_id, keys)
        self._store.store(job_metadata.job_id, self._placed(keys, job_metadata.chunk_ids))

    def submit_load(self, job_metadata: TransferJob, *, expedited: bool = False) -> None:
        """Start a load of chunks.

        Args:
            expedited: vLLM 0.33 asks for a place before other loads. Loads here go before stores in any case.
        """
        self._load_keys[job_metadata.job_id] = keys = list(job_metadata.keys)
        self._uses.job_begins(job_metadata.job_id, job_metadata.req_context.req_id, keys)
        tiers = [self._verdicts.tier_of(key) for key in keys]
        self._store.load(job_metadata.job_id, self._placed(keys, job_metadata.chunk_ids), tiers)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call. A chunk that was not loaded is a miss from now on."""
        return [self._job_result(ended) for ended in self._store.take_ended()]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of chunks of one prompt, the head first. Their end is evicted first."""
        self._touch(list(dict.fromkeys(keys))[::-1])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return vLLM's usual policy: chunks are offered as they are computed."""
        self._uses.request_begins(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's answers, and note a use of its chunks."""
        self._verdicts.request_ended(req_context.req_id)
        self._touch(self._uses.request_ended(req_context.req_id))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's questions to the tiers."""
        self._verdicts.flush()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the stored chunks since the last call."""
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended; their deadlines bound the wait."""
        self._store.drain()

    def shutdown(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and close the tiers.

        vLLM can unmap the chunks afterwards, since no view of them is left.
        """
        self._store.close()
        self._rows.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics: those of our own connector, by tier."""
        labels = ("tier",)
        kinds = ((OffloadingCounterMetadata, COUNTERS), (OffloadingGaugeMetadata, GAUGES))
        definitions: dict[str, OffloadingMetricMetadata] = {
            f"{_METRIC}{name}": kind(f"offload-core: {text}.", labels)
            for kind, table in kinds
            for name, text in table.items()
        }
        for name, text in HISTOGRAMS.items():
            definitions[f"{_METRIC}{name}"] = OffloadingHistogramMetadata(
                f"offload-core: {text}.", labels, BUCKET_SECONDS
            )
        return definitions

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call; gauges have their whole value."""
        stats = OffloadingConnectorStats()
        for (name, tier), count in self._store.counters.take().items():
            if name in GAUGES:
                self._gauges[name, tier] += count
                stats.set_gauge(f"{_METRIC}{name}", self._gauges[name, tier], (tier,))
            else:
                stats.increase_counter(f"{_METRIC}{name}", count, (tier,))
        for name, tier, value in single_values(self._store.counters.take_histograms()):
            stats.observe_histogram(f"{_METRIC}{name}", value, (tier,))
        return None if stats.is_empty() else stats

    def _chunk(self, chunk: int) -> PlaceParts:
        return (self._rows[chunk * self.block_size_bytes : (chunk + 1) * self.block_size_bytes],)

    def _find(self, keys: Sequence[OffloadKey]) -> Future[list[str | None]]:
        return self._store.locate([self._key(key) for key in keys])

    def _key(self, key: OffloadKey) -> ObjectKey:
        return ObjectKey(self._namespace, f"{_PACK}{get_offload_group_idx(key)}", get_offload_block_hash(key))

    def _placed(self, keys: Sequence[OffloadKey], chunk_ids: Iterable[Any]) -> list[PlacedObject]:
        return [PlacedObject(self._key(key), int(chunk)) for key, chunk in zip(keys, chunk_ids, strict=True)]

    def _touch(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self._store.touch([self._key(key) for key in keys])

    def _job_result(self, ended: EndedJob) -> JobResult:
        self._touch(self._uses.job_ended(ended.job_id))
        return self._load_result(ended) if ended.job_id in self._load_keys else self._store_result(ended)

    def _load_result(self, ended: EndedJob) -> JobResult:
        keys = self._load_keys.pop(ended.job_id)
        loaded = [key for key in keys if self._key(key) in ended.moved]
        if len(loaded) < len(keys):
            self._verdicts.doubt(set(keys) - set(loaded))
        return self._result(ended, len(loaded), len(loaded) == len(keys), loaded or None)

    def _store_result(self, ended: EndedJob) -> JobResult:
        keys = self._store_keys.pop(ended.job_id)
        stored = [key for key in keys if self._key(key) in ended.moved]
        if self._events is not None and stored:
            self._events.append(OffloadingEvent(stored, self.medium, removed=False, locality=self.locality))
        return self._result(ended, len(stored), len(stored) == len(keys) or self._declines, None)

    def _result(
        self, ended: EndedJob, moved: int, success: bool, successful_keys: Collection[OffloadKey] | None
    ) -> JobResult:
        return JobResult(
            ended.job_id,
            success,
            None if success else successful_keys,
            transfer_time=ended.seconds,
            transfer_bytes=moved * self.block_size_bytes,
        )


def _identity(spec: OffloadingSpec, chunk_bytes: int, given_name: str | None) -> dict[str, Json]:
    """Return the facts that decide a chunk's bytes: those of vLLM's file tier, and the model's files or its identity.

    Raises:
        ConfigError: a file of the model cannot be read, or nothing identifies it.
    """
    config = spec.config
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    return {
        "format_version": FORMAT_VERSION,
        "engine": ["vllm", vllm.__version__, "tiering"],
        "run": mapper.get_run_config(),
        "rank": mapper.rank,
        "layout": getattr(config, "kv_cache_layout", None),
        "chunk_bytes": chunk_bytes,
        "model": _model(config.model.name, given_name),
    }


def _model(name: str, given_name: str | None) -> dict[str, Json]:
    if given_name is not None:
        return {"model_identity": given_name}
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            [
                f"model_identity is missing: vLLM's tiering gives a tier the model's name {name!r} only, so new "
                "weights under this name would be served the old cache; set model_identity to a text that changes with "
                "the weights, or serve the model from a folder"
            ]
        )
    try:
        return {"files": files_identity(folder, FileDigests.of_user())}
    except OSError as error:
        raise ConfigError(
            [f"the model cannot be identified by its files: {error}; set model_identity, which stands for all files"]
        ) from error
