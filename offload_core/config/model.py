"""The configuration: one schema for inline keys and for a YAML, TOML or JSON file, every problem reported at once.

Two passes: the shape (this module's models), then each backend's own keys by its plugin's options model. Secrets among
these come from the environment; no error and no ``repr`` shows them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from offload_core.api.backend import BackendType
from offload_core.api.errors import ConfigError, PluginError
from offload_core.api.options import BackendOptions, Bytes, Seconds
from offload_core.config.file import read_keys
from offload_core.config.problems import Secrets, shown, validate, written_key
from offload_core.config.secrets import SecretField, from_environment, secret_fields, variable_name
from offload_core.config.tier_limits import TierLimits
from offload_core.memory.staging_size import StagingUse, staging_uses
from offload_core.objects.format import Codec
from offload_core.plugins.registry import PluginRegistry, load_plugins

_MIB = 1024 * 1024

WritePolicyName = Literal["every", "second-touch", "never"]
Compression = Literal["none", "zstd", "zstd-planes"]
CODECS: dict[Compression, Codec] = {"none": Codec.NONE, "zstd": Codec.ZSTD, "zstd-planes": Codec.ZSTD_PLANES}
"""The codec of each value of ``compression``."""


class BackendConfig(BaseModel):
    """The keys that every entry of ``backends`` has; the rest belongs to the backend's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: Annotated[
        str,
        Field(min_length=1, description="unique name of the tier, used in logs and metrics", examples=["nvme"]),
    ]
    type: Annotated[
        str, Field(min_length=1, description="backend type that a plugin provides, for example disk", examples=["disk"])
    ]
    load_weight: Annotated[
        float,
        Field(
            gt=0,
            strict=True,
            description="the tier with the highest matched tokens times weight serves a load",
            examples=[10],
        ),
    ] = 1.0
    open_timeout_seconds: Annotated[
        Seconds | None,
        Field(
            gt=0,
            description="when this tier has not opened by then the engine starts without it; by default the global one",
            examples=["10s"],
        ),
    ] = None
    load_timeout_seconds: Annotated[
        Seconds | None,
        Field(gt=0, description="base deadline of a load from this tier; by default the global one", examples=["5s"]),
    ] = None
    load_timeout_seconds_per_mib: Annotated[
        Seconds | None,
        Field(
            description="added to the deadline for each MiB of a load from this tier; by default the global one",
            examples=["50ms"],
        ),
    ] = None
    lookup_timeout_seconds: Annotated[
        Seconds | None,
        Field(
            gt=0,
            description="a lookup that this tier has not answered by then counts as a miss; by default the global one",
            examples=["200ms"],
        ),
    ] = None
    store_timeout_seconds: Annotated[
        Seconds | None,
        Field(gt=0, description="deadline of a store to this tier; by default the global one", examples=["10s"]),
    ] = None
    close_timeout_seconds: Annotated[
        Seconds | None,
        Field(
            gt=0, description="how long shutdown waits for this tier to close; by default the global one", examples=[1]
        ),
    ] = None
    breaker_failures: Annotated[
        int | None,
        Field(
            ge=1,
            strict=True,
            description="after so many failures in a row this tier is given a pause; by default the global one",
            examples=[5],
        ),
    ] = None
    breaker_pause_seconds: Annotated[
        Seconds | None,
        Field(gt=0, description="this tier's first pause; by default the global one", examples=["1s"]),
    ] = None
    breaker_max_pause_seconds: Annotated[
        Seconds | None,
        Field(gt=0, description="this tier's longest pause; by default the global one", examples=["60s"]),
    ] = None
    write_policy: Annotated[
        WritePolicyName,
        Field(
            description="what is stored here: every object; on its second-touch, which is another offered store or a "
            "load of it from another tier; or never",
            examples=["second-touch"],
        ),
    ] = "every"
    promote: Annotated[
        bool,
        Field(strict=True, description="keep what was loaded from a slower tier, as far as the write policy allows"),
    ] = True
    staging_share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            strict=True,
            description="part of the loads' half and of the stores' half of the staging memory that this tier may "
            "hold at once; by default 1 for a single tier and 0.75 for one of several",
            examples=[0.5],
        ),
    ] = None
    io_threads: Annotated[
        int,
        Field(ge=1, le=256, strict=True, description="threads that this tier's blocking calls may use", examples=[8]),
    ] = 4
    compression: Annotated[
        Compression,
        Field(
            description="how objects are stored where that saves at least 5 %: as they are, by zstd, or, for caches of "
            "16-bit values, by zstd after splitting their low from their high bytes; lossless",
            examples=["zstd-planes"],
        ),
    ] = "none"
    compression_level: Annotated[
        int, Field(ge=1, le=19, strict=True, description="level of zstd; higher ones are much slower", examples=[1])
    ] = 1


def _json_or_yaml(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError("the name must end in .json, .yaml or .yml (the content is JSON, which is YAML too)")
    return path


class OffloadSettings(BaseModel):
    """The top-level keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no clock waits for inf seconds

    hybrid_chunk_size: Annotated[
        int | None,
        Field(
            gt=0,
            strict=True,
            description="tokens per stored chunk; by default chosen from the model's block sizes",
            examples=[256],
        ),
    ] = None
    offload_prompt_only: Annotated[
        bool, Field(strict=True, description="store chunks of the prompt only, none that reach into generated tokens")
    ] = False
    staging_bytes: Annotated[Bytes, Field(ge=_MIB, description="host memory for objects on their way")] = 512 * _MIB
    load_timeout_seconds: Annotated[Seconds, Field(gt=0, description="base deadline of a load")] = (
        TierLimits.load_timeout_seconds
    )
    load_timeout_seconds_per_mib: Annotated[
        Seconds, Field(description="added to a load's deadline for each MiB it reads", examples=["50ms", 0.05])
    ] = TierLimits.load_timeout_seconds_per_mib
    store_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="an object that a tier has not stored by then, its time in the queue included, is not"),
    ] = TierLimits.store_timeout_seconds
    lookup_timeout_seconds: Annotated[
        Seconds, Field(gt=0, description="a tier that has not answered a lookup by then counts as a miss")
    ] = TierLimits.lookup_timeout_seconds
    lookup_grace_seconds: Annotated[
        Seconds, Field(description="how long a request that one tier has something for waits for the other tiers")
    ] = 0.02
    open_timeout_seconds: Annotated[
        Seconds, Field(gt=0, description="when a tier has not opened by then the engine starts without it")
    ] = TierLimits.open_timeout_seconds
    close_timeout_seconds: Annotated[
        Seconds, Field(gt=0, description="how long shutdown waits for a tier to close")
    ] = TierLimits.close_timeout_seconds
    breaker_failures: Annotated[
        int,
        Field(
            ge=1,
            strict=True,
            description="after so many failures or timeouts of one operation in a row a tier is not asked for a pause",
        ),
    ] = TierLimits.breaker_failures
    breaker_pause_seconds: Annotated[
        Seconds,
        Field(gt=0, description="the first such pause; each further one is twice as long until the tier works again"),
    ] = TierLimits.breaker_pause_seconds
    breaker_max_pause_seconds: Annotated[Seconds, Field(gt=0, description="the longest such pause")] = (
        TierLimits.breaker_max_pause_seconds
    )
    shutdown_timeout_seconds: Annotated[
        Seconds, Field(description="how long shutdown waits for stores on their way")
    ] = 3.0
    required_plugins: Annotated[
        list[str], Field(description="entry-point names of plugins that must be there although no backend names them")
    ] = []
    geometry_file: Annotated[
        Path | None,
        AfterValidator(_json_or_yaml),
        Field(description="file to which the engine writes its KV cache geometry at start, for `offload-core plan`"),
    ] = None
    backends: Annotated[list[BackendConfig], Field(min_length=1, description="the tiers, fastest first")]

    @property
    def limits(self) -> TierLimits:
        """The limits of every tier that has none of its own."""
        return TierLimits.of(self)

    @property
    def staging_uses(self) -> tuple[StagingUse, ...]:
        """How each tier uses the staging memory."""
        return staging_uses((backend.staging_share, backend.compression != "none") for backend in self.backends)


@dataclass(frozen=True)
class TierConfig:
    """One validated entry of ``backends`` with its plugin and its plugin's options."""

    common: BackendConfig
    backend_type: BackendType
    options: BackendOptions


@dataclass(frozen=True)
class OffloadConfig:
    """A whole validated configuration."""

    settings: OffloadSettings
    tiers: tuple[TierConfig, ...]
    plugins: PluginRegistry = field(default_factory=PluginRegistry, compare=False, repr=False)
    """Wraps the tiers' backends as they are opened and hears of what happens to them."""


def load_config(
    extra_config: Mapping[str, Any],
    registry: PluginRegistry | None = None,
    environ: Mapping[str, str] = os.environ,
) -> OffloadConfig:
    """Validate ``kv_connector_extra_config``: the keys themselves, or a file named by its ``config_file`` key, or both.

    A key may stand in one of the two places, not in both. Secrets of backends are read from ``environ`` only.

    Raises:
        ConfigError: with every problem, none of which shows a secret. The plugins' own errors are among them only
            where this configuration needs the plugin.
    """
    registry = registry if registry is not None else load_plugins()
    raw = dict(extra_config)
    source = "kv_connector_extra_config"
    problems: list[str] = []
    config_file = raw.pop("config_file", None)
    if config_file is not None:
        source = f"{config_file} (config_file)"
        from_file = read_keys(config_file)
        for key in sorted(set(raw) & set(from_file)):
            value = f" ({shown(raw[key])})" if key in OffloadSettings.model_fields and key != "backends" else ""
            problems.append(f"{key}: set in the file and inline as well{value}; remove one of the two")
        raw = {**from_file, **raw}
    settings, shape_problems = validate(OffloadSettings, raw, prefix="")
    problems += shape_problems
    tiers, tier_problems = _tiers(raw.get("backends"), registry, environ)
    problems += tier_problems
    problems += _missing_plugins(raw.get("required_plugins"), registry)
    if problems or settings is None:
        raise ConfigError(problems, source)
    return OffloadConfig(settings, tuple(tiers), registry)


def _tiers(
    raw_backends: object, registry: PluginRegistry, environ: Mapping[str, str]
) -> tuple[list[TierConfig], list[str]]:
    """Run the second pass over every entry whose type is known, whatever else is wrong."""
    tiers: list[TierConfig] = []
    problems: list[str] = []
    if not isinstance(raw_backends, list):
        return tiers, problems  # the first pass has said so
    entries = [(index, entry) for index, entry in enumerate(raw_backends) if isinstance(entry, dict)]
    names = Counter(entry.get("name") for _, entry in entries if isinstance(entry.get("name"), str))
    owners: dict[str, tuple[object, str]] = {}
    for index, entry in entries:
        prefix = f"backends.{index}."
        name, type_name = entry.get("name"), entry.get("type")
        if isinstance(name, str) and names[name] > 1:
            problems.append(f"{prefix}name: {name!r} is used by {names[name]} backends; give each a name of its own")
        if not isinstance(type_name, str) or not type_name:
            continue
        try:
            backend_type = registry.backend_type(type_name)
        except PluginError as error:
            problems.append(f"{prefix}type: {error}")
            continue
        secrets = secret_fields(backend_type.options)
        unusable = _unusable_secrets(secrets, prefix, backend_type)
        if unusable:
            problems += unusable
            continue
        if isinstance(name, str):
            problems += _shared_variables(secrets, prefix, name, owners)
        tier, tier_problems = _tier(entry, prefix, backend_type, secrets, environ)
        problems += tier_problems
        if tier is not None:
            tiers.append(tier)
    return tiers, problems


def _missing_plugins(names: object, registry: PluginRegistry) -> list[str]:
    problems: list[str] = []
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if isinstance(name, str):  # otherwise the first pass has said so
            try:
                registry.require(name)
            except PluginError as error:
                problems.append(f"required_plugins.{index}: {error}")
    return problems


def _tier(
    entry: dict[str, Any],
    prefix: str,
    backend_type: BackendType,
    secrets: list[SecretField],
    environ: Mapping[str, str],
) -> tuple[TierConfig | None, list[str]]:
    name = str(entry["name"]) if isinstance(entry.get("name"), str) and entry["name"] else None
    variables = {secret.key: variable_name(name, secret.name) for secret in secrets}
    given = {key: secret for secret in secrets for key in (secret.name, secret.key) if key in entry}
    problems = [
        f"{prefix}{key}: a secret is not written in a configuration, which vLLM logs; remove it and set the "
        f"environment variable {variables[secret.key]}"
        for key, secret in given.items()
    ]
    found = from_environment(secrets, name, environ)
    taken = {*BackendConfig.model_fields, *given}
    own = {key: value for key, value in entry.items() if isinstance(key, str) and key not in taken}
    option_keys = {written_key(name, field) for name, field in backend_type.options.model_fields.items()}
    valid_keys = {*BackendConfig.model_fields, *option_keys} - set(variables)
    reported = variables if name is None else {secret.key for secret in given.values()}
    hidden = Secrets(variables, [environ[variables[key]] for key in found], reported)
    options, option_problems = validate(backend_type.options, {**own, **found}, prefix, valid_keys, hidden)
    problems += option_problems
    common, _ = validate(BackendConfig, {k: v for k, v in entry.items() if k in BackendConfig.model_fields}, prefix)
    if options is None or common is None:  # the first pass has told what is wrong with the common keys
        return None, problems
    return TierConfig(common, backend_type, options), problems


def _unusable_secrets(secrets: list[SecretField], prefix: str, backend_type: BackendType) -> list[str]:
    return [
        f"{prefix}type: {backend_type.name!r} cannot be used: its option {secret.name!r} has a secret inside, which no "
        f"environment variable can fill; its author must make the secret an option of its own, of type SecretStr"
        for secret in secrets
        if secret.kind is None
    ]


def _shared_variables(
    secrets: list[SecretField], prefix: str, name: str, owners: dict[str, tuple[object, str]]
) -> list[str]:
    """Report secrets that would be read from the same variable as another's; ``owners`` collects who reads what."""
    problems = []
    for secret in secrets:
        variable = variable_name(name, secret.name)
        other, field = owners.setdefault(variable, (name, secret.name))
        if (other, field) != (name, secret.name):
            problems.append(
                f"{prefix}name: {name!r} would read its secret {secret.name!r} from {variable}, as {other!r} does its "
                f"{field!r}; rename one of the two"
            )
    return problems
