"""Reads and checks a configuration in two passes, and reports every problem at once.

The first pass checks the shape by the models of :mod:`offload_core.config.model`. The second pass checks each backend's
own keys by its plugin's options model. Secrets among these keys come from the environment. No error shows them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from offload_core.api.backend import BackendType
from offload_core.api.checks.credentials import credentials_in
from offload_core.api.errors import ConfigError, PluginError
from offload_core.api.options import BackendOptions
from offload_core.config import encryption_keys
from offload_core.config.file import read_keys
from offload_core.config.model import BackendConfig, OffloadConfig, OffloadSettings, TierConfig
from offload_core.config.problems import MAX_PROBLEMS, Secrets, shown, validate, written_key
from offload_core.config.secrets import SecretField, from_environment, secret_fields, variable_name
from offload_core.plugins.registry import PluginRegistry, load_plugins

if TYPE_CHECKING:
    from offload_core.objects.encryption import KeyRing  # which imports a package of the extra `encryption`

_ENCRYPTION_KEYS = SecretField(encryption_keys.FIELD, encryption_keys.FIELD, SecretStr)


def load_config(
    extra_config: Mapping[str, Any],
    registry: PluginRegistry | None = None,
    environ: Mapping[str, str] = os.environ,
    source: str = "kv_connector_extra_config",
) -> OffloadConfig:
    """Validate ``kv_connector_extra_config``: the keys themselves, or a file named by its ``config_file`` key, or both.

    A key may stand in one of the two places, not in both. Secrets of backends are read from ``environ`` only.

    Args:
        source: the name of the keys in messages.

    Raises:
        ConfigError: with every problem; none shows a secret. An error of a plugin is among them only if this
            configuration needs the plugin.
    """
    registry = registry if registry is not None else load_plugins()
    raw = dict(extra_config)
    problems: list[str] = []
    config_file = raw.pop("config_file", None)
    if config_file is not None:
        source = f"{config_file} (config_file)"
        from_file = read_keys(config_file)
        for key in sorted(set(raw) & set(from_file)):
            value = f" ({shown(raw[key])})" if key in OffloadSettings.model_fields and key != "backends" else ""
            problems.append(f"{key}: set in the file and inline as well{value}; remove one of the two")
        raw = {**from_file, **raw}
    if credentials := _credentials(raw, registry):  # alone, since messages about other problems show values
        raise ConfigError(credentials, source)
    settings, shape_problems = validate(OffloadSettings, raw, prefix="")
    problems += shape_problems
    tiers, tier_problems = _tiers(raw.get("backends"), registry, environ)
    problems += tier_problems
    problems += _missing_plugins(raw.get("required_plugins"), registry)
    if len(problems) > 2 * MAX_PROBLEMS:
        problems = [*problems[: 2 * MAX_PROBLEMS], f"and {len(problems) - 2 * MAX_PROBLEMS} more problems"]
    if problems or settings is None:
        raise ConfigError(problems, source)
    return OffloadConfig(settings, tuple(tiers), registry, raw)


def _credentials(raw: Mapping[str, Any], registry: PluginRegistry) -> list[str]:
    """Report the credentials in a configuration, without showing them.

    The models' own keys are no credentials by name: an option that holds one is a ``SecretStr``, refused later.
    """
    top = {key: value for key, value in raw.items() if key != "backends"}
    places = [(place, BackendOptions) for place in credentials_in(top, "", OffloadSettings.model_fields)]
    backends = raw.get("backends")
    for index, entry in enumerate(backends if isinstance(backends, list) else [backends]):
        options = _options_model(entry, registry)
        if any(secret.kind is None for secret in secret_fields(options)):
            continue  # the type is refused, and its values are never shown
        own = {key for name, field in options.model_fields.items() for key in (name, written_key(name, field))}
        path = f"backends.{index}" if isinstance(backends, list) else "backends"
        own |= {encryption_keys.FIELD, *BackendConfig.model_fields}
        places += [(place, options) for place in credentials_in(entry, path, own)]
    return [
        f"{place}: holds a credential; remove it from the configuration, which vLLM logs: {options.credentials_cure}"
        for place, options in places
    ]


def _options_model(entry: object, registry: PluginRegistry) -> type[BackendOptions]:
    type_name = entry.get("type") if isinstance(entry, dict) else None
    try:
        return registry.backend_type(type_name).options if isinstance(type_name, str) else BackendOptions
    except PluginError:  # reported later
        return BackendOptions


def _tiers(
    raw_backends: object, registry: PluginRegistry, environ: Mapping[str, str]
) -> tuple[list[TierConfig], list[str]]:
    """Run the second pass over every entry whose type is known, also if other keys are wrong."""
    tiers: list[TierConfig] = []
    problems: list[str] = []
    if not isinstance(raw_backends, list):
        return tiers, problems  # the first pass has reported it
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
        secrets = [_ENCRYPTION_KEYS, *secret_fields(backend_type.options)]
        unusable = _unusable_secrets(secrets, prefix, backend_type)
        if unusable:
            problems += unusable
            continue
        if isinstance(name, str):
            encrypts = entry.get("encryption", "none") != "none"
            in_use = [secret for secret in secrets if encrypts or secret is not _ENCRYPTION_KEYS]
            problems += _shared_variables(in_use, prefix, name, owners)
        tier, tier_problems = _tier(entry, prefix, backend_type, secrets, environ)
        problems += tier_problems
        if tier is not None:
            tiers.append(tier)
    return tiers, problems


def _missing_plugins(names: object, registry: PluginRegistry) -> list[str]:
    problems: list[str] = []
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if isinstance(name, str):  # otherwise the first pass has reported it
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
        f"{prefix}{key}: a secret must not be in the configuration, which vLLM logs; remove it and set the "
        f"environment variable {variables[secret.key]}"
        for key, secret in given.items()
    ]
    found = from_environment(secrets, name, environ)
    found.pop(_ENCRYPTION_KEYS.key, None)  # no option of the backend
    taken = {*BackendConfig.model_fields, *given}
    own = {key: value for key, value in entry.items() if isinstance(key, str) and key not in taken}
    option_keys = {written_key(name, field) for name, field in backend_type.options.model_fields.items()}
    valid_keys = {*BackendConfig.model_fields, *option_keys} - set(variables)
    reported = variables if name is None else {secret.key for secret in given.values()}
    hidden = Secrets(variables, [environ[variables[key]] for key in found], reported)
    options, option_problems = validate(backend_type.options, {**own, **found}, prefix, valid_keys, hidden)
    problems += option_problems
    common, _ = validate(BackendConfig, {k: v for k, v in entry.items() if k in BackendConfig.model_fields}, prefix)
    if options is None or common is None:  # the first pass has reported wrong common keys
        return None, problems
    try:
        keys = _encryption_keys(common, variables[_ENCRYPTION_KEYS.key], environ)
    except ValueError as error:
        return None, [*problems, f"{prefix}{error}"]
    return TierConfig(common, backend_type, options, keys), problems


def _encryption_keys(common: BackendConfig, variable: str, environ: Mapping[str, str]) -> KeyRing | None:
    """Return the keys of a tier that encrypts.

    Raises:
        ValueError: there are no keys or no valid ones, or there are keys without encryption.
    """
    text = environ.get(variable, "")
    if common.encryption == "none":
        if text:
            raise ValueError(
                f"encryption: the environment variable {variable} holds keys, but objects would be stored without "
                "encryption; set encryption to aes-256-gcm, or remove the variable"
            )
        return None
    if not text:
        raise ValueError(
            f"encryption: there is no key; set the environment variable {variable} to ID:KEY, for example "
            '"2026-11:$(openssl rand -base64 32)"'
        )
    try:
        return encryption_keys.parse_keys(text)
    except ValueError as error:
        raise ValueError(f"encryption: the environment variable {variable} is not valid: {error}") from None


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
    """Report secrets that share their environment variable with another tier's secret.

    Args:
        owners: the tier and field that read each variable; this call adds its own.
    """
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
