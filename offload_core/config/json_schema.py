"""A JSON schema of the configuration file, for editors and for checks before an engine starts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from offload_core.api.backend import BackendType
from offload_core.config import encryption_keys
from offload_core.config.model import BackendConfig, OffloadSettings
from offload_core.config.problems import written_key
from offload_core.config.secrets import secret_fields, variable_name
from offload_core.plugins.registry import PluginRegistry

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema(registry: PluginRegistry) -> dict[str, Any]:
    """Return the JSON schema of a whole configuration file, with the options of every backend type of ``registry``.

    The schema accepts every configuration that :func:`~offload_core.config.loading.load_config` accepts. Both refuse
    secrets in a file, since these come from the environment. JSON schema cannot express three
    checks: different names of tiers, bounds of a size or a duration in words, and a plugin's own validators.
    """
    schema, definitions = _model_schema(OffloadSettings, "")
    del definitions["BackendConfig"]
    entries = []
    for name, backend_type in sorted(registry.backend_types.items()):
        definitions[name], own = _entry_schema(backend_type)
        definitions.update(own)
        entries.append({"$ref": f"#/$defs/{name}"})
    schema["properties"]["backends"]["items"] = {"oneOf": entries} if entries else False
    return {
        "$schema": DIALECT,
        **schema,
        "title": "offload-core configuration",
        "description": "The file that `config_file` in vLLM's kv_connector_extra_config names.",
        "$defs": definitions,
    }


def _entry_schema(backend_type: BackendType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of one entry of ``backends``, and the definitions that it refers to."""
    common, _ = _model_schema(BackendConfig, "")
    secrets = secret_fields(backend_type.options)
    description = f"A tier of type {backend_type.name}."
    try:
        own, definitions = _model_schema(backend_type.options, f"{backend_type.name}.")
    except PydanticInvalidForJsonSchema:  # a plugin's own type; only the options of this backend type stay unknown
        own, definitions = {"additionalProperties": True}, {}
        description += " JSON schema cannot describe its options."
    if secrets:
        variables = ", ".join(f"{secret.name} ({variable_name(None, secret.name)})" for secret in secrets)
        description += f" Secrets are read from the environment, never from a file: {variables}."
    hidden = {encryption_keys.FIELD, *(name for secret in secrets for name in (secret.name, secret.key))}
    properties = {key: value for key, value in own.get("properties", {}).items() if key not in hidden}
    required = [key for key in own.get("required", []) if key not in hidden]
    entry = {
        "title": f"{backend_type.name} tier",
        "description": description,
        "type": "object",
        "properties": {
            **properties,
            **common["properties"],
            "type": {"const": backend_type.name, "description": common["properties"]["type"]["description"]},
        },
        "required": [*common["required"], *required],
        "additionalProperties": own.get("additionalProperties", False),
    }
    if entry["additionalProperties"] is not False:
        entry["properties"].update(dict.fromkeys(hidden, False))
    return entry, definitions


def _model_schema(model: type[BaseModel], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's schema and its definitions, whose names begin with ``prefix``."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    definitions = {f"{prefix}{name}": value for name, value in schema.pop("$defs", {}).items()}
    if "$ref" in schema:  # a model that holds itself
        schema = dict(definitions[schema["$ref"].removeprefix("#/$defs/")])
    for name, field in model.model_fields.items():
        written = schema["properties"].get(written_key(name, field))
        if written is not None:
            _add_bounds(written, field.metadata)
    return schema, definitions


def _add_bounds(schema: dict[str, Any], metadata: list[Any]) -> None:
    """Write a field's bounds beside the alternatives of its type, where pydantic omits them. They apply to numbers."""
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    for entry in metadata:
        for attribute, word in words.items():
            bound = getattr(entry, attribute, None)
            if "anyOf" in schema and bound is not None:
                schema[word] = bound
                for alternative in schema["anyOf"]:
                    alternative.pop(attribute, None)
