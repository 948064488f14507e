"""The configuration: one schema for inline keys and for a YAML, TOML or JSON file, every problem reported at once.

Two passes: the shape (this module's models), then each backend's own keys by its plugin's options model.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, PositiveFloat, ValidationError

from offload_core.backend import BackendOptions, BackendType
from offload_core.errors import ConfigError, PluginError
from offload_core.plugins import PluginRegistry, load_plugins

_MIB = 1024 * 1024

M = TypeVar("M", bound=BaseModel)


class BackendConfig(BaseModel):
    """The keys that every entry of ``backends`` has; the rest belongs to the backend's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, description="unique name of the tier, used in logs and metrics")]
    type: Annotated[str, Field(min_length=1, description="backend type that a plugin provides, for example disk")]
    load_weight: Annotated[
        PositiveFloat, Field(description="the tier with the highest matched tokens times weight serves a load")
    ] = 1.0
    load_timeout_seconds: Annotated[
        PositiveFloat | None, Field(description="base deadline of a load from this tier; by default the global one")
    ] = None
    io_threads: Annotated[int, Field(ge=1, le=256, description="threads that this tier's blocking calls may use")] = 4


def _json_or_yaml(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError("the name must end in .json, .yaml or .yml (the content is JSON, which is YAML too)")
    return path


class OffloadSettings(BaseModel):
    """The top-level keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no clock waits for inf seconds

    hybrid_chunk_size: Annotated[
        int | None,
        Field(gt=0, strict=True, description="tokens per stored chunk; by default chosen from the model's block sizes"),
    ] = None
    offload_prompt_only: Annotated[
        bool, Field(strict=True, description="store chunks of the prompt only, none that reach into generated tokens")
    ] = False
    staging_bytes: Annotated[
        ByteSize, Field(ge=_MIB, description="host memory for objects on their way, for example 512MiB")
    ] = ByteSize(512 * _MIB)
    load_timeout_seconds: Annotated[PositiveFloat, Field(description="base deadline of a load")] = 30.0
    load_timeout_seconds_per_mib: Annotated[
        float, Field(ge=0, description="added to a load's deadline for each MiB it reads")
    ] = 0.05
    lookup_timeout_seconds: Annotated[
        PositiveFloat, Field(description="a tier that has not answered a lookup by then counts as a miss")
    ] = 1.0
    open_timeout_seconds: Annotated[PositiveFloat, Field(description="deadline for opening a backend at start")] = 30.0
    shutdown_timeout_seconds: Annotated[
        float, Field(ge=0, description="how long shutdown waits for stores on their way")
    ] = 5.0
    geometry_file: Annotated[
        Path | None,
        AfterValidator(_json_or_yaml),
        Field(description="file to which the engine writes its KV cache geometry at start, for `offload-core plan`"),
    ] = None
    backends: Annotated[list[BackendConfig], Field(min_length=1, description="the tiers, fastest first")]


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


def load_config(extra_config: Mapping[str, Any], registry: PluginRegistry | None = None) -> OffloadConfig:
    """Validate ``kv_connector_extra_config``: the keys themselves, or a file named by its ``config_file`` key, or both.

    A key may stand in one of the two places, not in both.

    Raises:
        ConfigError: with every problem: the dotted path, the bad value, what would be valid, the cure.
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
            problems.append(f"{key}: set in the file and inline as well ({raw[key]!r}); remove one of the two")
        raw = {**from_file, **raw}
    settings, shape_problems = validate_keys(OffloadSettings, raw, prefix="")
    problems += shape_problems
    tiers, tier_problems = _tiers(raw.get("backends"), registry)
    problems += tier_problems
    if problems or settings is None:
        raise ConfigError(problems, source)
    return OffloadConfig(settings, tuple(tiers))


def read_keys(file: object, name: str = "config_file", source: str = "kv_connector_extra_config") -> dict[str, Any]:
    """Return the keys and values of a YAML, TOML or JSON file.

    Args:
        file: its path, as it was written.
        name: what the message calls the file.
        source: where the path was written.

    Raises:
        ConfigError: it is not there, cannot be read, or holds something else.
    """
    if not isinstance(file, str | Path):
        raise ConfigError([f"{name}: {file!r} is not a path; write the file's name as a string"], source)
    path = Path(file)
    readers: dict[str, Callable[[str], object]] = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".json": json.loads,
        ".toml": tomllib.loads,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError([f"{name}: {str(path)!r} must end in {', '.join(readers)}"], source)
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            [f"{name}: {str(path)!r} does not exist (looked in {Path.cwd()}); write its absolute path"], source
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{name}: {str(path)!r} cannot be read as {path.suffix[1:]}: {error}"], source) from error
    if not isinstance(content, dict):
        raise ConfigError(
            [f"{name}: {str(path)!r} holds {type(content).__name__}; it must hold keys and values"], source
        )
    return content


def _tiers(raw_backends: object, registry: PluginRegistry) -> tuple[list[TierConfig], list[str]]:
    """Run the second pass over every entry whose type is known, whatever else is wrong."""
    tiers: list[TierConfig] = []
    problems: list[str] = []
    if not isinstance(raw_backends, list):
        return tiers, problems  # the first pass has said so
    entries = [(index, entry) for index, entry in enumerate(raw_backends) if isinstance(entry, dict)]
    names = Counter(entry.get("name") for _, entry in entries if isinstance(entry.get("name"), str))
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
            problems.append(f"{prefix}type: {error}{_did_you_mean(type_name, registry.backend_types)}")
            continue
        own = {key: value for key, value in entry.items() if key not in BackendConfig.model_fields}
        valid_keys = [*BackendConfig.model_fields, *backend_type.options.model_fields]
        options, option_problems = validate_keys(backend_type.options, own, prefix, valid_keys)
        problems += option_problems
        if options is not None:
            try:
                common = BackendConfig.model_validate({k: v for k, v in entry.items() if k not in own})
            except ValidationError:
                continue  # the first pass has said so
            tiers.append(TierConfig(common, backend_type, options))
    return tiers, problems


def validate_keys(
    model: type[M], raw: Mapping[str, Any], prefix: str = "", valid_keys: Sequence[str] | None = None
) -> tuple[M | None, list[str]]:
    """Validate ``raw``; return the model, or ``None``, and every problem in a line: path, bad value, cure.

    Args:
        prefix: what the paths begin with.
        valid_keys: what to name beside an unknown key; by default the keys of the model that it stands in.
    """
    try:
        return model.model_validate(raw), []
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors(include_url=False)]
        return None, [_describe(detail, prefix, valid_keys or _keys_beside(detail, model)) for detail in details]


def _keys_beside(detail: dict[str, Any], model: type[BaseModel]) -> list[str]:
    """Return the keys that are known where ``detail`` found an unknown one, in a model in lists of models."""
    names = [name for name in detail["loc"][:-1] if isinstance(name, str)]
    for name in names if detail["type"] == "extra_forbidden" else ():
        (model,) = get_args(model.model_fields[name].annotation)
    return list(model.model_fields)


def _describe(detail: dict[str, Any], prefix: str, valid_keys: Sequence[str]) -> str:
    path = prefix + ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        key = str(detail["loc"][-1])
        hint = _did_you_mean(key, valid_keys)
        return f"{path}: unknown key{hint}; valid keys: {', '.join(sorted(valid_keys))}"
    if detail["type"] == "missing":
        return f"{path}: missing; add it"
    if detail["type"].startswith("byte_size"):
        return f"{path}: {detail['input']!r} is not a size; write a number of bytes or a size such as 20GiB or 512MiB"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {detail['input']!r} is not valid: {message}"


def _did_you_mean(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
