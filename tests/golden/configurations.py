"""Configurations, good and bad: all values that the good ones come to, and where the problems of the bad ones are."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import Field, SecretBytes, SecretStr

from tests.golden import subject
from tests.golden.masks import ROOT, path_of, without_prose

DISK = {"name": "nvme", "type": "disk", "path": "objects"}
CPU = {"name": "ram", "type": "cpu", "capacity": "1GiB"}
SHARE = {"name": "shared", "type": "nfs", "url": "memory://bucket/prefix"}


def _tiers(*backends: object, **settings: object) -> dict[str, Any]:
    return {**settings, "backends": list(backends)}


def _setting(**settings: object) -> dict[str, Any]:
    return _tiers(DISK, **settings)


def _disk(**keys: object) -> dict[str, Any]:
    return _tiers({**DISK, **keys})


CASES: dict[str, dict[str, Any]] = {
    # good ones
    "a disk": _tiers(DISK),
    "three tiers": _tiers(CPU, {**DISK, "load_weight": 4}, SHARE, required_plugins=["disk"]),
    "sizes and durations with units": _setting(
        staging_bytes="1.5GB", load_timeout_seconds="1m30s", load_timeout_seconds_per_mib="500us", hybrid_chunk_size=512
    ),
    "a file": {"config_file": "good.yaml"},
    "a TOML file": {"config_file": "good.toml"},
    "a file and inline": {"config_file": "good.json", "staging_bytes": "64MiB"},
    "every key": {"config_file": str(ROOT / "examples" / "offload-all-keys.yaml")},
    "direct_io as YAML reads a bare word": _disk(direct_io=True),
    "limits of a tier": _disk(
        open_timeout_seconds="10s", breaker_failures=2, write_policy="second-touch", promote=False, staging_share=0.5,
        io_threads=256, compression="zstd-planes", compression_level=19,
    ),
    # bad ones
    "nothing": {},
    "no tier": _tiers(),
    "tiers that are a mapping": {"backends": {"nvme": DISK}},
    "tiers that are no mappings": _tiers("disk", [DISK], None),
    "unknown keys": _tiers({**DISK, "pth": "x"}, hybrid_chunk_sizes=256, load_timeout=1),
    "a key that is no text": _tiers(dict([*DISK.items(), (7, "seven")])),
    "no name and no type": _tiers({"path": "objects"}, {"name": "", "type": ""}),
    "names that are used twice": _tiers(DISK, CPU, {**SHARE, "name": "nvme"}),
    "an unknown type": _tiers({"name": "a", "type": "dsk", "path": "objects"}),
    "an unknown plugin": _setting(required_plugins=["disk", "encryption"]),
    "numbers out of range": _setting(
        hybrid_chunk_size=0, staging_bytes="4KiB", load_timeout_seconds=0, breaker_failures=0, lookup_timeout_seconds=-1
    ),
    "durations that are none": _setting(
        load_timeout_seconds="5", store_timeout_seconds="soon", open_timeout_seconds=math.nan,
        shutdown_timeout_seconds=math.inf, close_timeout_seconds="5mm", lookup_grace_seconds=True,
    ),
    "sizes that are none": _setting(staging_bytes="1,5GiB"),
    "other types": _setting(
        hybrid_chunk_size="256", offload_prompt_only="yes", staging_bytes=[1], breaker_failures=2.5, required_plugins=3
    ),
    "a geometry file of another kind": _setting(geometry_file="geometry.txt"),
    "limits of a tier out of range": _disk(
        load_weight=0, open_timeout_seconds=0, breaker_failures=0, write_policy="sometimes", promote="yes",
        staging_share=1.5, io_threads=257, compression="gzip", compression_level=20, breaker_pause_seconds=0,
    ),
    "a weight without end": _disk(load_weight=math.inf),
    "a disk without a path": _tiers({"name": "a", "type": "disk"}),
    "a disk in a folder that is missing": _disk(path="missing/objects"),
    "a disk in a file": _disk(path="good.yaml"),
    "options of a disk out of range": _disk(
        capacity=0, high_watermark=1.5, low_watermark=0, keep_free="-1", eviction="fifo", fsync="always", direct_io="no"
    ),
    "watermarks of a disk in the wrong order": _disk(capacity="1GiB", high_watermark=0.5, low_watermark=0.6),
    "a cpu without a capacity": _tiers({"name": "ram", "type": "cpu"}),
    "options of a cpu out of range": _tiers(
        {**CPU, "capacity": 1, "eviction": "fifo", "pin": True, "prefault": "maybe"}
    ),
    "an nfs without a place": _tiers({"name": "a", "type": "nfs"}, {**SHARE, "name": "b", "url": "s3://"}),
    "places of an nfs that are none": _tiers(
        {**SHARE, "name": "a", "url": "/mnt/kv"}, {**SHARE, "name": "b", "url": "gopher://kv"},
        {**SHARE, "name": "c", "url": "file:///missing/share"},
    ),
    "credentials of an nfs": _tiers(
        {**SHARE, "name": "a", "storage_options": {"client": {"secretAccessKey": "x"}}},
        {**SHARE, "name": "b", "url": "sftp://user:word@host/kv"},
    ),
    "options of an nfs out of range": _tiers(
        {**SHARE, "lookup_cache_seconds": 61, "retry_seconds": 601, "part_size": "1MiB", "capacity": 0,
         "high_watermark": 0, "low_watermark": 2, "eviction_grace": "2h", "lease_seconds": 0}
    ),
    "watermarks of an nfs in the wrong order": _tiers({**SHARE, "high_watermark": 0.5, "low_watermark": 0.6}),
    "many problems in a file": {"config_file": "bad.yaml"},
    "a key in the file and inline": {"config_file": "good.json", "hybrid_chunk_size": 16},
    "a file that is missing": {"config_file": "missing.yaml"},
    "a file of another kind": {"config_file": "good.ini"},
    "a file that cannot be read": {"config_file": "broken.yaml"},
    "keys that are written twice": {"config_file": "twice.yaml"},
    "an empty file": {"config_file": "empty.yaml"},
    "a file with a list": {"config_file": "list.json"},
    "a file that is no path": {"config_file": 7},
}  # fmt: skip

FILES = {
    "good.yaml": "hybrid_chunk_size: 256\nbackends:\n  - {name: nvme, type: disk, path: objects}\n",
    "good.toml": 'hybrid_chunk_size = 256\n[[backends]]\nname = "nvme"\ntype = "disk"\npath = "objects"\n',
    "good.json": json.dumps({"hybrid_chunk_size": 256, "backends": [DISK]}),
    "good.ini": "[backends]\n",
    "bad.yaml": "hybrid_chunk_size: none\nstaging_bites: 1\n"
    "backends:\n  - {name: a, type: disk}\n  - {name: a, type: tape}\n",
    "broken.yaml": "backends: [\n",
    "twice.yaml": "staging_bytes: 1MiB\nstaging_bytes: 2MiB\nbackends: []\n",
    "empty.yaml": "",
    "list.json": "[1]",
}


def write_files(folder: Path) -> None:
    """Write the files that the cases name."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


def outcomes(folder: Path) -> dict[str, Any]:
    """Return what becomes of every case."""
    write_files(folder)
    found: dict[str, Any] = {}
    with contextlib.chdir(folder):
        for name, configuration in CASES.items():
            values, problems = subject.configured(configuration, {})
            paths = sorted(map(path_of, problems))
            found[name] = {"problems at": paths} if values is None else {"values": values}
    text = json.dumps(found).replace(str(folder), "<folder>")
    return dict(json.loads(text))


def schema(folder: Path) -> Any:
    """Return names, types, defaults and limits of every key, of the bundled backends only."""
    code, out, err = subject.run_command(["schema"])
    assert (code, err) == (0, "")
    document = json.loads(out)
    bundled = ("cpu", "disk", "nfs")
    document["$defs"] = {
        name: definition for name, definition in document["$defs"].items() if name.split(".")[0] in bundled
    }
    items = document["properties"]["backends"]["items"]
    items["oneOf"] = [entry for entry in items["oneOf"] if entry["$ref"].rpartition("/")[2] in bundled]
    return without_prose(document)


# Secrets


class VaultOptions(subject.BackendOptions):
    token: SecretStr = Field(description="needed")
    access_key: SecretStr | None = Field(None, description="not needed")
    raw_key: SecretBytes | None = Field(None, description="not needed", alias="raw-key")


NAMES = ("nvme", "s3-west", "S3.West 2", "ünïcode", "_", "1")


def secrets(folder: Path) -> dict[str, Any]:
    """Return the environment variables that hold a backend's secrets, and where messages name them."""
    kind: Any = subject.Backend  # never constructed
    vault = subject.BackendType("vault", kind, VaultOptions)
    registry = subject.PluginRegistry([vault])
    variables: dict[str, Any] = {}
    for name in NAMES:
        tier = {"name": name, "type": "vault"}
        _, (problem,) = subject.configured(_tiers(tier), {}, registry)
        refused = [{**tier, key: "x"} for key in ("token", "access_key", "raw-key")]
        written = [subject.configured(_tiers(entry), {}, registry)[1] for entry in refused]
        variables[name] = {
            "missing": {path_of(problem): _variables(problem)},
            "written": [{path_of(problem): _variables(problem) for problem in problems} for problems in written],
        }
        needed = _variables(problem)[0]
        values, problems = subject.configured(_tiers(tier), {needed: "word"}, registry)
        variables[name]["set"] = problems or values["backends"][0]["options"] if values else problems
        variables[name]["set and empty"] = sorted(
            map(path_of, subject.configured(_tiers(tier), {needed: ""}, registry)[1])
        )
    return variables


def _variables(problem: str) -> list[str]:
    return re.findall(r"OFFLOAD_CORE_\w+", problem)
