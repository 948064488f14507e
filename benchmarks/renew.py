"""Renew the committed results, one benchmark after the other.

    python -m benchmarks.renew [NAME …]

Each result is a file in ``benchmarks/results``. Without names, the command renews all of them, which takes about 40
minutes on two cores. The machine should do nothing else meanwhile. Run ``make plots`` afterwards to redraw the plots
and rewrite the tables.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

from benchmarks.reporting.document import RESULTS_FOLDER, ROOT

COMMANDS = {
    "ttft": "ttft --dtype float32",
    "lmcache_connector": "lmcache_connector --dtype float32",
    "crossover": "crossover --rounds 6",
    "scheduler": "scheduler",
    "scheduler_own": "scheduler --medium own",
    "backends": "backends --gib 0.25 --rounds 3 --only speed",
    "cpu_memory": "cpu_memory --rounds 10",
    "disk_capacity": "disk_capacity build --mib 256 --rounds 3",
    "disk_scan": "disk_scan build",
    "faults": "faults --only first-tokens",
    "faults_breaker": "faults --only breaker --samples 500",
    "faults_two_tiers": "faults --only two-tiers",
    "codecs": "codecs",
    "device_copies": "device_copies --page-kib 64,256,1024 --pages 16 --rounds 5 --turns 0",
    "device_tokens": "device_copies --page-kib 256 --pages 16 --rounds 1 --turns 6 --models 12B",
    "placement": "placement build/traces/agentic-60.jsonl.gz:256 build/traces/mooncake-conversation.jsonl.gz "
    "build/traces/mooncake-synthetic.jsonl.gz",
    "live_curve": "live_curve build/traces/agentic-60.jsonl.gz:256 build/traces/mooncake-conversation.jsonl.gz "
    "build/traces/mooncake-synthetic.jsonl.gz",
}
"""The command of each result, without ``python -m benchmarks.`` and without ``--json``."""


def arguments_of(name: str) -> list[str]:
    """Return the words after ``python -m``."""
    module, *options = COMMANDS[name].split()
    result = (RESULTS_FOLDER / f"{name}.json").relative_to(ROOT).as_posix()
    return [f"benchmarks.{module}", *options, "--json", result]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(COMMANDS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(COMMANDS):
        parser.error(f"no such results: {', '.join(sorted(unknown))}; choose from {', '.join(COMMANDS)}")
    failed: list[str] = []
    for name in arguments.names or COMMANDS:
        command = arguments_of(name)
        print(f"\n=== {name}: python -m {shlex.join(command)}", flush=True)
        if subprocess.call([sys.executable, "-m", *command], cwd=ROOT):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; their results are not renewed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
