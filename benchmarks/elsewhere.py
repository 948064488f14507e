"""Throughput of our tiers below other systems, beside these systems' own file tiers, which verify nothing.

python -m benchmarks.elsewhere FOLDER [--system vllm|lmcache|sglang] [--chunks 64] [--chunk-mib 2] [--rounds 5]

Theirs and ours run turn by turn, each in a folder below FOLDER. A round stores all chunks from the system's host
memory, empties it, and loads them again. The table shows medians in GB/s, without the first round. Ours hashes all
bytes at each store and each load; theirs does not. Below vLLM, both run under vLLM's ``TieringOffloadingManager``.
With ``--system lmcache``, our adapter is measured beside LMCache's own one on files. With ``--system sglang``, our
backend is measured beside SGLang's own one on files, as SGLang's controller calls them. There, a load begins with a
lookup.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

_MIB = 1 << 20


def candidates(system: str, folder: Path, chunk_bytes: int, chunks: int) -> dict[str, Any]:
    """Make everything that is measured below a system. The systems' packages are imported here only."""
    if system == "lmcache":
        from benchmarks.lmcache_adapters import Adapter, adapters

        return {name: Adapter(config, chunk_bytes) for name, config in adapters(folder).items()}
    if system == "sglang":
        from benchmarks.sglang_backends import Backend, backends

        return {name: Backend(arguments, chunk_bytes, chunks) for name, arguments in backends(folder).items()}
    from benchmarks.vllm_tiers import Tier, tiers

    return {name: Tier(config, chunk_bytes, chunks) for name, config in tiers(folder).items()}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--system", choices=["vllm", "lmcache", "sglang"], default="vllm")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-mib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chunk_bytes = arguments.chunk_mib * _MIB
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="elsewhere-"))
    seconds: dict[str, list[tuple[float, float]]] = {}
    engines: dict[str, Any] = {}
    try:
        engines = candidates(arguments.system, folder, chunk_bytes, arguments.chunks)
        for turn in range(arguments.rounds + 1):
            numbers = range(turn * arguments.chunks, (turn + 1) * arguments.chunks)
            for name, engine in engines.items():
                seconds.setdefault(name, []).append(engine.measure(numbers))
    finally:
        for engine in engines.values():
            engine.close()
        shutil.rmtree(folder)
    gigabytes = arguments.chunks * chunk_bytes / 1e9
    base: list[float] = []
    print(f"{'tier':34} {'store GB/s':>11} {'load GB/s':>11} {'of theirs':>16}")
    for name, rounds in seconds.items():
        rates = [statistics.median(gigabytes / one[kind] for one in rounds[1:]) for kind in (0, 1)]
        base = base or rates
        print(f"{name:34} {rates[0]:11.2f} {rates[1]:11.2f} {rates[0] / base[0]:7.2f} {rates[1] / base[1]:7.2f}")


if __name__ == "__main__":
    main()
