"""Rows of figures, a class for each table of a benchmark, and the results that hold the rows.

A benchmark prints its tables from these rows and writes the same rows, so both always agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict

Figure = Annotated[float, AfterValidator(lambda number: float(f"{number:.5g}"))]
"""A measured number; five digits are more than any benchmark can repeat."""
Operation = Literal["store", "load"]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile by linear interpolation."""
    return float(np.percentile(list(values), percent))


class Row(BaseModel):
    """One row of figures."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Results(BaseModel):
    """All rows of one run of a benchmark; a part that did not run is empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    benchmark: ClassVar[str]
    """The benchmark's module below ``benchmarks``."""


class FirstToken(Row):
    """Time to first token in one way; the ratio compares the median with that of the local prefix cache."""

    name: str
    served_tokens: int
    samples: int
    p50_ms: Figure
    p90_ms: Figure
    p99_ms: Figure
    ratio: Figure


class Ttft(Results):
    """Results of ``benchmarks.ttft``."""

    benchmark = "ttft"
    prompt_tokens: int
    first_tokens: list[FirstToken]


class FirstTokenFromLMCache(FirstToken):
    """Time to first token of one model in one way, where a load is the time beyond that of the local prefix cache."""

    model: str
    transfer_mode: str | None
    """Mode of LMCache's connector."""
    load_ms: Figure | None
    speed_beside_lmcache: Figure | None
    """Time of a load by LMCache's connector in relation to ours; ``None`` if ours is too short for a comparison."""

    @property
    def is_ours(self) -> bool:
        """True for a load from our tier."""
        return self.load_ms is not None and self.transfer_mode is None


class LMCacheConnector(Results):
    """Results of ``benchmarks.lmcache_connector``."""

    benchmark = "lmcache_connector"
    prompt_tokens: int
    first_tokens: list[FirstTokenFromLMCache]


class Crossing(Row):
    """Time to first token of a stored prompt from one tier; the ratio compares ours with the better of the others."""

    latency_ms: Figure
    mb_per_second: Figure
    tokens: int
    compute_p50_ms: Figure
    compute_spread: Figure
    """Ratio of the medians of two equal engines that compute."""
    load_p50_ms: Figure
    ours_p50_ms: Figure
    ours_p90_ms: Figure
    loaded: Figure
    """Share of our measured requests that were loaded."""
    ratio: Figure


class Crossover(Results):
    """Results of ``benchmarks.crossover``."""

    benchmark = "crossover"
    rows: list[Crossing]


class Lookup(Row):
    """Answers to one question in one geometry; ratios compare our medians with stock's."""

    geometry: str
    tokens: int
    question: str
    samples: int
    aim: Figure
    stock_p50_us: Figure
    stock_p90_us: Figure
    stock_cpu_us: Figure
    ours_p50_us: Figure
    ours_p90_us: Figure
    engine_p50_us: Figure
    ours_cpu_us: Figure
    ratio: Figure
    engine_ratio: Figure
    cpu_ratio: Figure


class Growth(Row):
    """Factors from the second longest prompt to the longest, and counts of all lookups, in one geometry."""

    geometry: str
    chunks_factor: Figure
    cpu_factor: Figure
    hashes: int
    """Block hashes computed."""
    chunks: int
    """Chunks that the answers cover, summed over all packs."""
    asked: int
    """Objects asked for."""
    asked_twice: int
    """Objects asked for more than once in one lookup."""


class Steps(Row):
    """Decoding steps in one geometry."""

    geometry: str
    samples: int
    aim: Figure
    stock_p50_us: Figure
    stock_p90_us: Figure
    stock_max_us: Figure
    ours_p50_us: Figure
    ours_p90_us: Figure
    ours_max_us: Figure
    ratio: Figure


class Objects(Row):
    """Objects per 1,024 tokens in one geometry."""

    geometry: str
    aim: Figure
    stock_keys: Figure
    our_objects: Figure
    ratio: Figure


class Scheduler(Results):
    """Results of ``benchmarks.scheduler``."""

    benchmark = "scheduler"
    medium: Literal["shared", "own"]
    """``shared``: the half asks the medium; ``own``: the half keeps an index of the medium."""
    lookups: list[Lookup]
    growth: list[Growth]
    steps: list[Steps]
    objects: list[Objects]


class Speed(Row):
    """Speed of one contender; ratios compare medians, and above 1 the contender is faster."""

    backend: str
    medium: str
    page_kib: int
    threads: int
    operation: Operation
    name: str
    rounds: int
    gb_per_second_p50: Figure
    gb_per_second_p10: Figure
    gb_per_second_p90: Figure
    cpu_seconds_per_gib: Figure
    vllm_ratio: Figure | None
    limit_ratio: Figure
    vllm_aim: Figure | None = None
    limit_aim: Figure | None = None
    plain_cpu_ratio: Figure | None = None
    """CPU seconds per GiB in relation to those of the plain loop; ``None`` in older results and without a loop."""
    plain_cpu_aim: Figure | None = None


class Peak(Row):
    """Peak memory of a process beyond its memory at the start, which includes staging."""

    name: str
    stored_mib: Figure
    peak_mib: Figure


class Calls(Row):
    """Durations of small calls on a backend with this number of objects."""

    name: str
    objects: int
    samples: int
    fill_us_per_object: Figure
    contains_p50_us: Figure
    contains_p90_us: Figure
    prepare_store_p50_us: Figure
    prepare_store_p90_us: Figure
    store_p50_us: Figure
    store_p90_us: Figure
    load_p50_us: Figure
    load_p90_us: Figure


class Backends(Results):
    """Results of ``benchmarks.backends``."""

    benchmark = "backends"
    speed: list[Speed]
    peaks: list[Peak]
    growth: list[Calls]


class Copies(Row):
    """Speed of the cpu tier beside plain copies; if a ratio is above 1, the tier is faster."""

    fragmented: bool
    object_kib: int
    threads: int
    operation: Operation
    rounds: int
    gib_per_second: Figure
    memcpy_gib_per_second: Figure
    ratio_p10: Figure
    ratio_p50: Figure
    ratio_p90: Figure
    cpu_seconds_per_gib: Figure
    memcpy_cpu_seconds_per_gib: Figure


class CpuMemory(Results):
    """Results of ``benchmarks.cpu_memory``."""

    benchmark = "cpu_memory"
    copies: list[Copies]


class Capacity(Row):
    """Stores of several processes into one folder; the ratio compares medians."""

    processes: int
    object_kib: int
    rounds: int
    without_mib_per_second: Figure
    with_mib_per_second: Figure
    taken_ratio: Figure
    """Part of the objects that were stored in the folder with a capacity, in the last round."""
    ratio: Figure


class Fsync(Row):
    """Stores of one process with one fsync policy."""

    policy: str
    object_kib: int
    rounds: int
    mib_per_second: Figure


class DiskCapacity(Results):
    """Results of ``benchmarks.disk_capacity``."""

    benchmark = "disk_capacity"
    capacity: list[Capacity]
    fsync: list[Fsync]


class Scan(Row):
    """Scan of a folder of unregistered objects."""

    objects: int
    make_seconds: Figure
    open_ms: Figure
    scan_seconds: Figure
    memory_mib: Figure
    account_mib: Figure


class CallsDuringScan(Row):
    """Calls for a batch of keys while the scan runs."""

    operation: str
    keys: int
    samples: int
    first_ms: Figure
    p50_ms: Figure
    p90_ms: Figure
    p99_ms: Figure
    max_ms: Figure


class DiskScan(Results):
    """Results of ``benchmarks.disk_scan``."""

    benchmark = "disk_scan"
    scan: list[Scan]
    calls: list[CallsDuringScan]


class FaultyFirstToken(Row):
    """Time to first token in one state of a tier; ratios compare with the engine without that tier."""

    state: str
    kind: str
    samples: int
    served_tokens_min: int
    served_tokens_max: int
    p50_ms: Figure
    p90_ms: Figure
    p99_ms: Figure
    p50_ratio: Figure
    slice_ratio_min: Figure
    slice_ratio_max: Figure
    p99_ratio: Figure


class BreakerRatio(Row):
    """Ratio of first tokens with an open breaker to both engines without the tier, and its 95 % interval."""

    kind: str
    percent: int
    ratio: Figure
    low: Figure
    high: Figure
    aim: Figure


class TwoTiers(Row):
    """Batches of prompts that a healthy tier serves below another tier; ratios compare with the healthy tier alone."""

    state: str
    batches: int
    served_tokens_min: int
    served_tokens_max: int
    tokens_per_second: Figure
    ratio: Figure
    slice_ratio_min: Figure
    slice_ratio_max: Figure
    load_p50_ms: Figure
    load_p99_ms: Figure
    aim: Figure | None = None


class Faults(Results):
    """Results of ``benchmarks.faults``."""

    benchmark = "faults"
    prompt_tokens: int
    batch_prompts: int
    batch_prompt_tokens: int
    first_tokens: list[FaultyFirstToken]
    breaker: list[BreakerRatio]
    two_tiers: list[TwoTiers]


class Compression(Row):
    """One codec on one kind of data; without speeds if the data does not get smaller."""

    data: str
    codec: str
    level: int
    ratio: Figure
    encode_mb_per_second: Figure | None = None
    decode_mb_per_second: Figure | None = None


class Codecs(Results):
    """Results of ``benchmarks.codecs``."""

    benchmark = "codecs"
    zstd_version: str
    payload_bytes: int
    compression: list[Compression]


class Placed(Row):
    """One simulation of a tier that serves a trace."""

    trace: str
    geometry: str
    capacity_gb: Figure | None
    """In units of 10^9 bytes; ``None`` for no limit."""
    rule: str
    hit_rate: Figure
    written_tb: Figure | None
    """In units of 10^12 bytes; ``None`` for a bound, which stores nothing."""


class Placement(Results):
    """Results of ``benchmarks.placement``."""

    benchmark = "placement"
    runs: list[Placed]


class Estimate(Row):
    """One live curve that has seen a trace."""

    trace: str
    geometry: str
    capacity_gb: Figure
    """In units of 10^9 bytes; the curve has half, one, two and four times this capacity."""
    sampled_share: Figure
    """Part of the chunks that are sampled."""
    simulated: list[Figure]
    """Hit rates by rising capacity."""
    estimated: list[Figure]
    us_per_request: Figure
    """Processor time for all four capacities, in microseconds."""


class LiveCurve(Results):
    """Results of ``benchmarks.live_curve``."""

    benchmark = "live_curve"
    memory_mib: Figure
    """Memory of one curve, at most."""
    runs: list[Estimate]


class DeviceCopy(Row):
    """One way to copy pages between an accelerator and host memory; the ratio compares it with one large copy."""

    page_kib: Figure
    pages: int
    """Pages of an object."""
    objects: int
    way: str
    rounds: int
    gb_per_second_p50: Figure
    gb_per_second_p10: Figure
    gb_per_second_p90: Figure
    engine_us_per_object: Figure | None
    """Time of the engine's thread per object, in microseconds; ``None`` for copies that the engine does not make."""
    ratio: Figure


class TokensPerSecond(Row):
    """Tokens per second of an engine, prompts and outputs together, of new prompts that are stored or not."""

    model: str
    """Its parameters, as "12B"."""
    name: str
    turns: int
    stored_p50: Figure
    opted_out_p50: Figure
    to_opted_out_p50: Figure
    """Ratio of a stored batch to the other one of its turn."""
    to_none_p10: Figure
    """Ratio of a stored batch to the speed of the engine without a connector in the same turn."""
    to_none_p50: Figure
    to_none_p90: Figure
    stored_objects: int
    dropped_objects: int
    """Objects that the buffer on the device, or staging memory, had no room for."""


class DeviceCopies(Results):
    """Results of ``benchmarks.device_copies``."""

    benchmark = "device_copies"
    device: str
    batched: bool
    """True if vLLM's batched copy was used."""
    copies: list[DeviceCopy]
    tokens: list[TokensPerSecond]
