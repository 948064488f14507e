"""Every command on the ``nfs`` backend: on a shared folder, and on a bucket of a real S3 server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.cli.probes import sealed
from offload_core.objects.format import object_bytes
from offload_core.runtime.threads import DaemonExecutor
from tests.core.cli.conftest import FIRST, SECOND, Ended, Site, key

SIZE = object_bytes(1000)


def _share(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"url": (tmp_path / "shared").as_uri()}


def _bucket(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return dict(request.getfixturevalue("s3_options"))


@pytest.fixture(params=[_share, pytest.param(_bucket, marks=pytest.mark.long)], ids=["file", "s3"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    made = request.param(request, tmp_path)
    assert isinstance(made, dict)
    return made


def _stored(options: dict[str, Any], keys: Sequence[ObjectKey], damaged: Sequence[ObjectKey]) -> None:
    """Store objects as an engine does, some of them with one bit changed."""

    async def store() -> None:
        backend = NfsBackend(NfsOptions(**options), BackendContext("shared", DaemonExecutor(2, "shared")))
        await backend.open()
        objects = []
        for stored in keys:
            content = bytearray(sealed(stored, bytes(1000)))
            content[len(content) // 2] ^= int(stored in damaged)
            objects.append(memoryview(content))
        await backend.store(keys, objects)
        await backend.close()

    asyncio.run(store())


@pytest.mark.parametrize("script", [False, pytest.param(True, marks=pytest.mark.long)], ids=["in-process", "script"])
def test_every_command(site: Site, options: dict[str, Any], script: bool) -> None:
    site.environment |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    config = str(site.folder / "shared.json")
    Path(config).write_text(json.dumps({"backends": [{"name": "shared", "type": "nfs", **options}]}))

    def run(*arguments: str, code: int = 0) -> Ended:
        done = site.run(*arguments) if script else site.invoke(*arguments)
        assert (done.code, "Traceback" in done.err) == (code, False), (arguments, done)
        return done

    def tier(*arguments: str, code: int = 0) -> dict[str, Any]:
        (document,) = run(*arguments, "--json", code=code).json["tiers"]
        return dict(document)

    assert "nfs" in run("plugins", "--strict").out
    assert tier("check", config)["ok"]
    assert run("ls", config, "--json").json["objects"] == [], "the probe of check is gone"

    keys = [key(1), key(2), key(3, SECOND)]
    _stored(options, keys, damaged=keys[:1])
    listed = run("ls", config, "--json").json["objects"]
    assert {entry["hash"] for entry in listed} == {stored.chunk_hash.hex() for stored in keys}
    total = tier("stats", config)["total"]
    assert (total["objects"], total["bytes"]) == (3, 3 * SIZE)

    (bad,) = tier("verify", config, code=1)["bad"]
    assert (bad["hash"], bad["damaged"]) == (keys[0].chunk_hash.hex(), True)
    assert tier("verify", config, "--delete", code=1)["deleted_objects"] == 1
    assert tier("verify", config)["verified_objects"] == 2

    assert set(tier("bench", config, "--objects", "4")["operations"]) == {"store", "lookup", "load"}
    pruned = tier("prune", config, "--fingerprint", FIRST[:8], "--yes")
    assert (pruned["objects"], pruned["removed_objects"]) == (2, 1)
    (left,) = run("ls", config, "--json").json["objects"]
    assert left["hash"] == keys[2].chunk_hash.hex()
