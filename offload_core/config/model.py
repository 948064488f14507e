"""The configuration's schema: one for inline keys and for a YAML, TOML or JSON file.

:mod:`offload_core.config.loading` reads and checks a configuration. :mod:`offload_core.config.limits` has the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from offload_core.api.backend import BackendType
from offload_core.api.eviction_order import EvictionPolicy
from offload_core.api.options import BackendOptions, Bytes, Seconds
from offload_core.config.limits import LimitOverrides, Limits
from offload_core.memory.staging_size import StagingUse, staging_uses
from offload_core.objects.format import Codec
from offload_core.planning.placement import PlacementPolicy
from offload_core.planning.write_policy import WritePolicyName
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.companion_child import ProcessLimits
from offload_core.runtime.metrics import ALL_TIERS

if TYPE_CHECKING:
    from offload_core.objects.encryption import KeyRing  # which imports a package of the extra `encryption`

_MIB = 1024 * 1024

LoadPolicy = Literal["cheaper", "always"]
IoProcessMode = Literal["engine", "tier", "off"]
Compression = Literal["none", "zstd", "zstd-planes"]
Encryption = Literal["none", "aes-256-gcm"]
CODECS: dict[Compression, Codec] = {"none": Codec.NONE, "zstd": Codec.ZSTD, "zstd-planes": Codec.ZSTD_PLANES}
"""The codec of each value of ``compression``."""


def _printable_name(name: str | None) -> str | None:
    if name is not None and (not name.isprintable() or name != name.strip()):
        raise ValueError("the name must be of printable characters, without spaces at its ends")
    return name


def _name_of_one_tier(name: str) -> str:
    if name == ALL_TIERS:
        raise ValueError("metrics use this name for all tiers together; choose another one")
    return name


class _TierIdentity(BaseModel):
    """The first keys of every entry of ``backends``."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=100,
            description="Unique name of the tier, used in logs and metrics.",
            examples=["nvme"],
        ),
        AfterValidator(_printable_name),
        AfterValidator(_name_of_one_tier),
    ]
    type: Annotated[
        str,
        Field(min_length=1, description="Backend type that a plugin provides, for example `disk`.", examples=["disk"]),
    ]
    load_weight: Annotated[
        float,
        Field(
            gt=0,
            strict=True,
            description="Preference for loads: the tier with the most seconds saved times weight serves a load.",
            examples=[10],
        ),
    ] = 1.0


class BackendConfig(LimitOverrides, _TierIdentity):
    """The keys that every entry of ``backends`` has; the rest belongs to the backend's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    write_policy: Annotated[
        WritePolicyName,
        Field(
            description="Objects that the tier stores: `every` object, only on `second-touch`, or `never` any. A "
            "second touch is another offered store, or a load of the object from another tier.",
            examples=["second-touch"],
        ),
    ] = "every"
    promote: Annotated[
        bool,
        Field(strict=True, description="Keep objects loaded from a slower tier, as far as the write policy allows."),
    ] = True
    staging_share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            strict=True,
            description="Part of the loads' half and of the stores' half of the staging memory that this tier may "
            "hold at once. A single tier may hold all of it, one of several tiers 0.75.",
            examples=[0.5],
        ),
    ] = None
    io_threads: Annotated[
        int,
        Field(
            ge=1,
            le=256,
            strict=True,
            description="Threads for this tier's stores. Loads and lookups have as many each.",
            examples=[8],
        ),
    ] = 4
    compression: Annotated[
        Compression,
        Field(
            description="Lossless compression of objects, where it saves at least 5 %. `zstd-planes` splits low from "
            "high bytes before zstd, for caches of 16-bit values.",
            examples=["zstd-planes"],
        ),
    ] = "none"
    compression_level: Annotated[
        int, Field(ge=1, le=19, strict=True, description="Level of zstd. High levels are much slower.", examples=[1])
    ] = 1
    encryption: Annotated[
        Encryption,
        Field(
            description="Encryption of objects, after compression. The keys come from the environment variable "
            "`OFFLOAD_CORE_<TIER NAME>_ENCRYPTION_KEYS`. Needs the extra `encryption`.",
            examples=["aes-256-gcm"],
        ),
    ] = "none"

    @property
    def encodes(self) -> bool:
        """True if objects are compressed or encrypted on the medium, which takes a second lease per object."""
        return self.compression != "none" or self.encryption != "none"


def _json_or_yaml(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError("the name must end in .json, .yaml or .yml (the content is JSON, which is YAML too)")
    return path


def _json_lines(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".jsonl", ".json"):
        raise ValueError("the name must end in .jsonl or .json (the content is one JSON object per line)")
    return path


class _ChunkSettings(BaseModel):
    """The first keys at the top of the configuration."""

    hybrid_chunk_size: Annotated[
        int | None,
        Field(
            gt=0,
            strict=True,
            description="Tokens per stored chunk. If unset, the model's block sizes decide.",
            examples=[256],
        ),
    ] = None
    offload_prompt_only: Annotated[
        bool, Field(strict=True, description="Store chunks of the prompt only, none with generated tokens.")
    ] = False
    placement: Annotated[
        PlacementPolicy,
        Field(
            description="Windows and recurrent states to store: `everything`; only those `kept` where a later prompt "
            "will probably resume; or also the others, `kept and spare`, into free capacity only.",
            examples=["kept"],
        ),
    ] = "kept and spare"
    retained_share_per_tenant: Annotated[
        float,
        Field(
            ge=0,
            le=0.5,
            strict=True,
            description="Part of the smallest tier's capacity that KV hints of one tenant may protect from eviction. "
            "All tenants together may protect half of it. 0: refuse `retain` and `pin`.",
            examples=[0.25],
        ),
    ] = 0.1
    load_when: Annotated[
        LoadPolicy,
        Field(
            description="Load only when that is expected to be `cheaper` in seconds than to compute, or `always`. With "
            "`always`, the tier with the highest matched tokens times weight serves a load.",
            examples=["always"],
        ),
    ] = "cheaper"
    staging_bytes: Annotated[
        Bytes, Field(ge=_MIB, description="Host memory for objects between the KV cache and the tiers.")
    ] = 512 * _MIB
    sync_load_budget_bytes: Annotated[
        Bytes,
        Field(
            description="Bytes that each rank may load within one step of the engine, from memory that a tier lends. "
            "Such a request runs in that step; others wait for the end of their load. 0: always wait.",
            examples=["64MiB"],
        ),
    ] = 256 * _MIB
    device_buffer_bytes: Annotated[
        Bytes | None,
        Field(
            ge=1,
            description="Memory of an accelerator for stores on their way to host memory, beside the KV cache. If "
            "unset, a 256th of the accelerator's memory, but at least 64 MiB and room for four of the largest objects.",
            examples=["256MiB"],
        ),
    ] = None


def _yaml_off(value: object) -> object:
    """Return ``off`` for the false that YAML makes of it."""
    return "off" if value is False else value


class _IoProcessSettings(BaseModel):
    """The keys of the I/O process."""

    io_process: Annotated[
        IoProcessMode,
        BeforeValidator(_yaml_off),
        Field(
            description="Run the tiers in one I/O process per `engine` and host, in one per `tier`, or on threads of "
            "the engine's processes (`off`).",
            examples=["engine"],
        ),
    ] = "engine"
    io_process_timeout_seconds: Annotated[
        Seconds,
        Field(
            ge=2, description="Time without a sign of life after which the I/O process is replaced.", examples=["30s"]
        ),
    ] = 10.0
    io_process_niceness: Annotated[
        int, Field(ge=0, le=19, strict=True, description="Niceness of the I/O process.", examples=[5])
    ] = 0
    io_process_cpus: Annotated[
        list[Annotated[int, Field(ge=0, le=65535, strict=True)]],
        Field(description="Processors of the I/O process. If empty, those of the engine.", examples=[[0, 1]]),
    ] = []
    io_process_memory_bytes: Annotated[
        Bytes | None,
        Field(
            ge=256 * _MIB,
            description="Limit for the private memory of the I/O process, without objects of `cpu` tiers. Allocations "
            "beyond it fail.",
            examples=["64GiB"],
        ),
    ] = None


class OffloadSettings(Limits, _IoProcessSettings, _ChunkSettings):
    """The keys at the top of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model_identity: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="Name for the model and its weights, in place of the digests of its files. Two models under "
            "one name give wrong text.",
            examples=["llama-3.1-70b-2026-01"],
        ),
        AfterValidator(_printable_name),
    ] = None
    required_plugins: Annotated[
        list[str],
        Field(description="Entry-point names of plugins that must be installed though no backend needs them."),
    ] = []
    geometry_file: Annotated[
        Path | None,
        AfterValidator(_json_or_yaml),
        Field(description="File to which the engine writes its KV cache geometry at start, for `offload-core plan`."),
    ] = None
    trace_file: Annotated[
        Path | None,
        AfterValidator(_json_lines),
        Field(
            description="New file for a trace of this engine's prompts, for `offload-core simulate`: times, lengths "
            "and salted chunk ids, without any content."
        ),
    ] = None
    trace_file_bytes: Annotated[
        Bytes, Field(ge=_MIB, description="Largest size of the trace. Nothing more is recorded then.")
    ] = 256 * _MIB
    kv_events_resync_seconds: Annotated[
        Seconds | None,
        Field(
            description="If vLLM publishes KV cache events: time after which all announced objects are checked on "
            "their tiers and announced again. With `null`, never.",
            examples=[60.0],
        ),
    ] = 600.0
    backends: Annotated[list[BackendConfig], Field(min_length=1, description="The tiers, fastest first.")]

    @property
    def limits(self) -> Limits:
        """The global limits. A tier's own limits take precedence."""
        return Limits.model_validate(self.model_dump(include=set(Limits.model_fields)))

    @property
    def io_process_limits(self) -> ProcessLimits:
        """The share of the machine that the I/O process gets."""
        return ProcessLimits(self.io_process_niceness, frozenset(self.io_process_cpus), self.io_process_memory_bytes)

    @property
    def staging_uses(self) -> tuple[StagingUse, ...]:
        """Each tier's use of the staging memory."""
        return staging_uses((backend.staging_share, backend.encodes) for backend in self.backends)


@dataclass(frozen=True)
class TierConfig:
    """One validated entry of ``backends`` with its plugin and its plugin's options."""

    common: BackendConfig
    backend_type: BackendType
    options: BackendOptions
    encryption_keys: KeyRing | None = field(default=None, repr=False)
    """``None`` if the tier does not encrypt."""

    @property
    def capacity_bytes(self) -> int | None:
        """The option ``capacity``, as the bundled backends have it; ``None`` if there is none."""
        capacity = getattr(self.options, "capacity", None)
        return capacity if isinstance(capacity, int) and capacity > 0 else None

    @property
    def eviction(self) -> EvictionPolicy:
        """The option ``eviction``, as the bundled backends have it; ``lru`` if there is none, or another policy."""
        found = getattr(self.options, "eviction", None)
        return next((policy for policy in get_args(EvictionPolicy) if policy == found), "lru")

    @property
    def watermarks(self) -> tuple[float, float]:
        """The options ``low_watermark`` and ``high_watermark``, as bundled backends have them; otherwise 1 each."""
        low, high = (getattr(self.options, name, None) for name in ("low_watermark", "high_watermark"))
        if isinstance(low, int | float) and isinstance(high, int | float) and 0 < low <= high <= 1:
            return low, high
        return 1.0, 1.0


@dataclass(frozen=True)
class OffloadConfig:
    """A whole validated configuration."""

    settings: OffloadSettings
    tiers: tuple[TierConfig, ...]
    plugins: PluginRegistry = field(default_factory=PluginRegistry, compare=False, repr=False)
    """The plugins, which may wrap the tiers' backends and observe their events."""
    keys: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The keys as they were written, from all places together; no secret is among them."""
