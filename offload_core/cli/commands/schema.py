"""``offload-core schema``: the JSON schema of the configuration file."""

from __future__ import annotations

from offload_core.cli.application import app
from offload_core.cli.output import print_json
from offload_core.config.json_schema import config_schema
from offload_core.plugins.registry import load_plugins


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, with the options of every installed backend.

    An editor can check and complete a configuration with it.

    Example: `offload-core schema > offload.schema.json`
    """
    print_json(config_schema(load_plugins()))
