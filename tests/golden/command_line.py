"""The command line: what each command takes, prints and exits with, on fixed objects and geometries."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer.main

from tests.golden import subject
from tests.golden.configurations import write_files
from tests.golden.masks import ROOT, as_json, masked, measured
from tests.golden.objects import KEY
from tests.golden.subject import ObjectKey
from tests.support.prompt_traces import conversations, trace_of, write_trace

GEOMETRIES = sorted((ROOT / "examples" / "geometries").glob("*.yaml"))
OTHER = "cd" * 32
OLD_SECONDS = 2 * 24 * 3600 + 30 * 60 + 30

CASES = {
    "plugins": ["plugins", "plugins --strict", "plugins --json", "plugins --unknown", "plugins offload.json"],
    "schema": ["schema", "schema offload.json"],
    "plan": [
        "plan deepseek-v4.yaml --chunk-size 256 --chunk-size 1024 --chunk-size 4096",
        "plan gemma-3-4b.yaml --chunk-size 100 --json",
        "plan gpt-oss-20b.yaml --config offload.json",
        "plan gpt-oss-20b.yaml --config small-staging.json --json",
        "plan gpt-oss-20b.yaml --chunk-size 256 --chunk-size 1048576 --json",
        "plan gpt-oss-20b.yaml --chunk-size 1048576",
        "plan gpt-oss-20b.yaml --chunk-size 1048576 --json",
        "plan gpt-oss-20b.yaml --chunk-size many",
        "plan gpt-oss-20b.yaml --config missing.yaml",
        "plan missing.yaml",
        "plan missing.yaml --json",
        "plan bad.yaml --json",
        "plan",
    ],
    "simulate": [
        "simulate trace.jsonl --geometry gpt-oss-20b.yaml --block-tokens 256 --capacity 100MiB,none --placement kept",
        "simulate trace.jsonl --geometry qwen3-next-80b.yaml --chunk-size 544 --block-tokens 256 --json",
        "simulate trace.jsonl --geometry gpt-oss-20b.yaml",
        "simulate trace.jsonl --geometry gpt-oss-20b.yaml --json",
        "simulate trace.jsonl --geometry gpt-oss-20b.yaml --block-tokens 256 --capacity large",
        "simulate missing.jsonl --geometry gpt-oss-20b.yaml",
        "simulate trace.jsonl --geometry bad.yaml --json",
        "simulate trace.jsonl",
        "simulate",
    ],
    "advise": [
        "advise metrics.txt",
        "advise metrics.txt --json",
        "advise trace.jsonl",
        "advise missing.txt --json",
        "advise",
    ],
    "top": [
        "top metrics.txt --once",
        "top metrics.txt --once --json",
        "top - --json",
        "top metrics.txt --interval 1ms",
        "top trace.jsonl",
        "top missing.txt --json",
        "top",
    ],
    "check": [
        "check offload.json",
        "check offload.json --json",
        "check offload.json --tier shared --json",
        "check ram.json --json",
        "check broken.json --json",
        "check offload.json --tier tape",
        "check bad.yaml",
        "check bad.yaml --json",
        "check missing.yaml",
        "check",
    ],
    "bench": [
        "bench offload.json --objects 2 --object-size 4KiB",
        "bench offload.json --objects 2 --object-size 4KiB --concurrency 2 --tier nvme --json",
        "bench broken.json --objects 1 --object-size 4KiB --json",
        "bench offload.json --object-size 1GiB",
        "bench offload.json --object-size large",
        "bench offload.json --objects 0",
        "bench bad.yaml",
        "bench",
    ],
    "ls": [
        "ls offload.json",
        "ls offload.json --json",
        "ls offload.json --pack full-u256 --namespace CD",
        "ls offload.json --tier shared --limit 0 --json",
        "ls offload.json --limit 2 --tier nvme --json",
        "ls ram.json --json",
        "ls offload.json --namespace ../etc",
        "ls offload.json --limit -1",
        "ls bad.yaml",
        "ls",
    ],
    "stats": [
        "stats offload.json",
        "stats offload.json --json",
        "stats ram.json --json",
        "stats offload.json --tier tape",
        "stats bad.yaml",
        "stats",
    ],
    "verify": [
        "verify offload.json",
        "verify offload.json --json",
        "verify damaged.json --json",
        "verify damaged.json --delete --quiet --json",
        "verify damaged.json --json",
        "verify bad.yaml",
        "verify",
    ],
    "prove": [
        "prove MODEL --config bad.yaml",
        "prove MODEL --config offload.json --tier tape",
        "prove",
        "prove --help",
    ],
    "prune": [
        "prune offload.json --older-than 1d --dry-run",
        "prune offload.json --older-than 1d -n --json",
        "prune offload.json --max-bytes 10KiB --dry-run",
        "prune offload.json --fingerprint CDCD --dry-run",
        "prune offload.json --keep-fingerprint cd --keep-fingerprint 00 --dry-run",
        "prune offload.json --fingerprint ab --max-bytes 0 --dry-run --json",
        "prune offload.json",
        "prune offload.json --older-than 1d",
        "prune offload.json --older-than soon --yes",
        "prune offload.json --max-bytes lots --yes",
        "prune offload.json --fingerprint xyz --yes",
        "prune bad.yaml --older-than 1d --yes",
        "prune offload.json --older-than 1d --yes",
        "prune offload.json --older-than 0s --yes --tier shared --json",
        "ls offload.json",
        "prune",
    ],
    "offload-core": ["--help", "-h", "check -h", "plan --help", "unknown", "--version"],
}
"""The commands of each transcript, in this order, in one folder; ``unknown`` names are meant to be wrong."""

ORDER_IS_THE_MEDIUMS = ("ls",)
MEASURED = ("check", "bench")


def transcript(name: str) -> Callable[[Path], str]:
    """Return the producer of a transcript."""

    def produce(folder: Path) -> str:
        prepare(folder)
        with contextlib.chdir(folder):
            return "\n".join(map(_shown, CASES[name]))

    return produce


def plan_text(geometry: Path) -> Callable[[Path], str]:
    """Return the producer of a plan as people read it."""
    return lambda folder: _without_ends(_printed("plan", str(geometry)))


def plan_json(geometry: Path) -> Callable[[Path], Any]:
    """Return the producer of a plan as programs read it."""

    def produce(folder: Path) -> Any:
        with contextlib.chdir(ROOT):
            document = json.loads(_printed("plan", geometry.relative_to(ROOT).as_posix(), "--json"))
        return masked(document, keep_floats=True)

    return produce


def parameters(folder: Path) -> dict[str, Any]:
    """Return the arguments and options of every command, without their texts."""
    group: Any = typer.main.get_command(subject.app)
    commands = {"offload-core": group, **group.commands}
    return {
        name: [
            {
                "kind": parameter.param_type_name,
                "written": [*parameter.opts, *parameter.secondary_opts]
                if parameter.param_type_name == "option"
                else [],
                "metavar": parameter.metavar,
                "default": parameter.default,
                "required": parameter.required,
                "several": parameter.multiple,
                "flag": getattr(parameter, "is_flag", False),
            }
            for parameter in command.params
            if parameter.name not in ("install_completion", "show_completion")
        ]
        for name, command in commands.items()
    }


def prepare(folder: Path) -> None:
    """Write configurations, geometries and tiers with objects."""
    write_files(folder)
    for geometry in GEOMETRIES:
        shutil.copy(geometry, folder)
    write_trace(folder / "trace.jsonl", trace_of(conversations(3, 4, 800), 256), header=False)
    values = {"capacity_bytes": 2.0**30, "estimated_prompt_tokens_total": 1000.0}
    for multiple, ratio in {"_half": 0.2, "": 0.3, "_twice": 0.5, "_four_times": math.nan}.items():
        values[f"estimated_hit_ratio{multiple}"] = ratio
    lines = [f'vllm:hybrid_offload_{name}{{engine="0",tier="nvme"}} {value}\n' for name, value in values.items()]
    (folder / "metrics.txt").write_text("".join(lines))
    (folder / "shared").mkdir()
    nvme = {"name": "nvme", "type": "disk", "path": "nvme"}
    shared = {"name": "shared", "type": "nfs", "url": f"file://{folder}/shared", "retry_seconds": 0}
    for name, tiers in {
        "offload": [nvme, shared],
        "damaged": [{**nvme, "path": "damaged"}],
        "ram": [{"name": "ram", "type": "cpu", "capacity": "1MiB"}],
        "broken": [{"name": "broken", "type": "disk", "path": "broken"}, nvme],
        "small-staging": [nvme],
    }.items():
        staging = "1MiB" if name == "small-staging" else "64MiB"
        (folder / f"{name}.json").write_text(json.dumps({"staging_bytes": staging, "backends": tiers}))
    for number, (fingerprint, pack, payload_bytes) in enumerate(
        [(KEY.namespace, "full-u256", 1000), (KEY.namespace, "window-u64-w128", 2000), (OTHER, "full-u256", 4000)]
    ):
        key = ObjectKey(fingerprint, pack, bytes([number]) * 32)
        for tier in ("nvme", "shared")[: 1 + number % 2]:
            _put(folder / tier, key, payload_bytes, age_seconds=0 if number else OLD_SECONDS)
    for number, position in enumerate((20, -1)):
        damaged = _put(folder / "damaged", KEY._replace(chunk_hash=bytes([number])), 1000, age_seconds=0)
        content = bytearray(damaged.read_bytes())
        content[position] ^= 1
        damaged.write_bytes(content)
    _put(folder / "damaged", KEY, 1000, age_seconds=0)
    (folder / "broken").mkdir()
    (folder / "broken" / ("0" * 64)).write_text("where the folder of the probes would be")


def _put(tier: Path, key: ObjectKey, payload_bytes: int, *, age_seconds: float) -> Path:
    """Store an object; one without age is from the future, so that its age is printed as 0 s."""
    digest = key.chunk_hash.hex()
    path = tier / key.namespace / key.pack / digest[:2] / f"{digest}.kv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(subject.sealed(key, bytes(payload_bytes)))
    stored_at = time.time() - (age_seconds or -3600)
    os.utime(path, (stored_at, stored_at))
    return path


def _shown(words: str) -> str:
    """Run a command; returns it with all that it printed and its exit code."""
    name = words.split()[0]
    code, out, err = subject.run_command(words.split())
    if name == "schema" or "-h" in words:
        out = f"<{'text' if out else 'nothing'}>\n"
    elif "--json" in words:
        out = as_json(_document(json.loads(out))) if out else ""
    elif name == "plugins":
        out = _plugins(out)
    elif name in MEASURED:
        out = measured(out)
    elif name in ORDER_IS_THE_MEDIUMS:
        head, body = out.splitlines(keepends=True)[:2], out.splitlines(keepends=True)[2:]
        out = "".join([*head, *sorted(body)])
    elif name == "plan":
        out = _without_ends(out)
    out = re.sub(r"\b2d30m\d\ds", "2d30m<n>s", out)
    return f"$ offload-core {words}\n{out}exit code {code}; stderr: {'some' if err else 'nothing'}\n"


def _document(document: Any) -> Any:
    if "plugins" in document:
        bundled = [plugin for plugin in document["plugins"] if plugin["distribution"] == "offload-core"]
        return masked({"plugins": bundled}, {"version", "module"})
    if "objects" in document:
        document["objects"].sort(key=lambda found: (found["tier"], found["hash"]))
        if any(tier["truncated"] for tier in document["tiers"]):  # which of them are listed is the medium's choice
            document["objects"] = len(document["objects"])
    if "tiers" in document:
        for tier in document["tiers"]:
            tier.get("bad", []).sort(key=lambda bad: str(bad["hash"]))
    return masked(document, keep_floats="plans" in document or "runs" in document)


def _plugins(table: str) -> str:
    lines = [line for line in table.splitlines() if " offload-core " in line or "distribution" in line]
    return "".join(re.sub(r" +", " ", re.sub(r"\d+\.\d+\S*", "<version>", line)).rstrip() + "\n" for line in lines)


def _without_ends(table: str) -> str:
    """Return a table without the spaces at its lines' ends."""
    return "".join(f"{line.rstrip()}\n" for line in table.splitlines())


def _printed(*arguments: str) -> str:
    code, out, err = subject.run_command(arguments)
    assert (code, err) == (0, ""), err
    return out
