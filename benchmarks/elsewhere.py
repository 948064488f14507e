"""Throughput of our tiers below vLLM's own tiering, beside vLLM's file tier, which verifies nothing.

python -m benchmarks.elsewhere FOLDER [--system lmcache] [--chunks 64] [--chunk-mib 2] [--rounds 5]

Both run below vLLM's own ``TieringOffloadingManager``, turn by turn, each in a folder below FOLDER. A round stores all
chunks of an empty primary tier, empties it, and loads them again. The table shows medians in GB/s, without the first
round. Our tier hashes all bytes at each store and each load; theirs does not. With ``--system lmcache``, our adapter is
measured beside LMCache's own one on files. Then a load begins with a lookup.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.elsewhere.tiering_rig import OUR_TIER, Engine, offload_key, offloading_config

_MIB = 1 << 20


def tiers(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of each tier under test."""

    def ours(io_process: str, direct_io: str) -> dict[str, Any]:
        path = str(folder / f"ours-{io_process}-{direct_io}")
        backend = {"name": "disk", "type": "disk", "path": path, "direct_io": direct_io}
        return {**OUR_TIER, "model_identity": "benchmark", "io_process": io_process, "backends": [backend]}

    return {
        "vLLM's fs tier, unchecked": {"type": "fs", "root_dir": str(folder / "theirs")},
        "ours, direct I/O": ours("engine", "on"),
        "ours, direct I/O, on threads": ours("off", "on"),
        "ours, page cache": ours("engine", "off"),
    }


def measure(engine: Engine, numbers: range, pause_seconds: float) -> tuple[float, float]:
    """Return the seconds of one store and one load of all chunks; every chunk must be a hit."""
    with engine.request() as context:
        places = engine.manager.prepare_store([offload_key(number) for number in numbers], context)
        for number, place in zip(numbers, places.store_spec.chunk_ids, strict=True):
            engine.row(int(place))[:] = hashlib.shake_128(number.to_bytes(8, "big")).digest(1 << 16) * (
                engine.tier.block_size_bytes >> 16
            )
        started = time.perf_counter()
        engine.manager.complete_store(places.keys_to_store, context)
        while engine.manager.has_pending_work():
            engine.step()
            time.sleep(pause_seconds)
        stored = time.perf_counter() - started
    engine.forget_primary()
    with engine.request() as context:
        started = time.perf_counter()
        found = engine.resolve(numbers, context)
        loaded = time.perf_counter() - started
        assert {result.name for result in found} == {"HIT"}, f"lost: {found}"
    engine.forget_primary()
    return stored, loaded


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--system", choices=["vllm", "lmcache"], default="vllm")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-mib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chunk_bytes = arguments.chunk_mib * _MIB
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="elsewhere-"))
    seconds: dict[str, list[tuple[float, float]]] = {}
    engines: dict[str, Any] = {}
    try:
        if arguments.system == "lmcache":
            from benchmarks.lmcache_adapters import Adapter, adapters

            engines = {name: Adapter(config, chunk_bytes) for name, config in adapters(folder).items()}
        for name, tier in tiers(folder).items() if arguments.system == "vllm" else ():
            engines[name] = Engine(offloading_config(tier, chunk_bytes=chunk_bytes, chunks=arguments.chunks))
        for turn in range(arguments.rounds + 1):
            numbers = range(turn * arguments.chunks, (turn + 1) * arguments.chunks)
            for name, engine in engines.items():
                took = measure(engine, numbers, 0.001) if arguments.system == "vllm" else engine.measure(numbers)
                seconds.setdefault(name, []).append(took)
    finally:
        for engine in engines.values():
            engine.close()
        shutil.rmtree(folder)
    gigabytes = arguments.chunks * chunk_bytes / 1e9
    base: list[float] = []
    print(f"{'tier':30} {'store GB/s':>11} {'load GB/s':>11} {'of theirs':>16}")
    for name, rounds in seconds.items():
        rates = [statistics.median(gigabytes / one[kind] for one in rounds[1:]) for kind in (0, 1)]
        base = base or rates
        print(f"{name:30} {rates[0]:11.2f} {rates[1]:11.2f} {rates[0] / base[0]:7.2f} {rates[1] / base[1]:7.2f}")


if __name__ == "__main__":
    main()
