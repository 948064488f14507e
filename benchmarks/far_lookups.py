"""Lookups on a distant object store: time until the answer, and requests.

An S3-compatible server of this machine (moto) stands behind a proxy that adds a latency. The bucket has the first 480
chunks of the prompts. The server answers about 300 requests per second, so many requests take long here. Contenders:

- "ours": a lookup as the scheduler half makes it, without anything known beforehand;
- "again": the same lookup once more;
- "every object": one question about all objects of all ranks.

The limit is one round trip of the network. Ratios compare medians with "every object".

    python -m benchmarks.far_lookups [--rounds 5] [--latency 20 --latency 100]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.reporting.rows import percentile
from tests.support.far_bucket import CHUNK_TOKENS, FarTier, fill_bucket
from tests.support.far_proxy import FarProxy
from tests.support.s3_server import S3_CREDENTIALS, S3Server

PROMPTS = (4 * 1024, 32 * 1024, 128 * 1024)
STORED_CHUNKS = 480
RANKS = (1, 8)


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def measure(far: FarTier, proxy: FarProxy, tokens: int, ranks: int, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Return, per contender, its milliseconds in each round and its requests in the last one."""
    results: dict[str, tuple[list[float], int]] = {}

    def run(name: str, work: Callable[[], object]) -> None:
        before, milliseconds = proxy.requests, timed(work)
        results[name] = ([*results.get(name, ([], 0))[0], milliseconds], proxy.requests - before)

    for _ in range(rounds):
        far.forget()
        run("ours", lambda: far.ask(tokens, ranks))
        run("again", lambda: far.ask(tokens, ranks))
        run("every object", lambda: far.ask_about_all(tokens, ranks))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, action="append", help="of a round trip, in milliseconds")
    arguments = parser.parse_args()
    os.environ.update(S3_CREDENTIALS)
    with tempfile.TemporaryDirectory() as folder:
        server = S3Server(Path(folder, "server.log"))
        try:
            bucket = fill_bucket(server, STORED_CHUNKS)
            for latency in arguments.latency or [20.0, 100.0]:
                with FarProxy(server.port, latency / 1e3).running() as proxy:
                    far = FarTier(bucket, proxy)
                    Console().print(table(far, proxy, latency, arguments.rounds))
                    far.close()
        finally:
            server.kill()


def table(far: FarTier, proxy: FarProxy, latency: float, rounds: int) -> Table:
    """Measure all prompts at one latency, and return the table."""
    made = Table(title=f"Round trip of {latency:g} ms; chunks of {CHUNK_TOKENS} tokens", title_justify="left")
    for column in ("prompt tokens", "ranks", "", "ms p50", "p90", "requests", "every object / this"):
        made.add_column(column, justify="right" if column else "left")
    far.ask_about_all(PROMPTS[0], 1)  # opens connections
    for tokens in PROMPTS:
        for ranks in RANKS:
            results = measure(far, proxy, tokens, ranks, rounds)
            every = percentile(results["every object"][0], 50)
            for name, (milliseconds, requests) in results.items():
                p50, p90 = percentile(milliseconds, 50), percentile(milliseconds, 90)
                made.add_row(
                    f"{tokens:,}", str(ranks), name, f"{p50:.0f}", f"{p90:.0f}", str(requests), f"{every / p50:.1f}"
                )
    return made


if __name__ == "__main__":
    main()
