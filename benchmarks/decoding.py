"""Time between the tokens of decoding requests, while other requests store and load: on the real engine.

vLLM runs a small Gemma 3 with seeded random weights on one thread, so another core is left for I/O. Some requests
decode all the time. Other requests arrive beside them, at the same steps and with the same prompts for each contender:

- "stores": prompts that no cache has. All contenders compute them, and ours also store them;
- "loads": prompts whose objects are on the ``disk`` tier, in the page cache. Ours load them (``load_when: always``);
- "both": the two kinds in turns.

Contenders, all alive at once, take turns in random order:

- "none": no connector, so each prompt is computed;
- "threads": ours with ``io_process: off``;
- "process": ours with ``io_process: engine``.

"alone" is the engine without a connector while no other request arrives. Each turn begins with an empty prefix cache
and no dirty pages. It is measured from the first token of all decoding requests until their last one.

The percentiles of the time between tokens are those of one turn, and the tables show their medians over rounds. A ratio
compares two contenders of the same round. A load replaces computation, so "none" has more to do then: compare loads
with "alone" too.

    python -m benchmarks.decoding [--rounds 7] [--decoding 4] [--output-tokens 300] [--prompt-tokens 1100] [--every 12]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.live_engines import LiveEngine, Order, prepare_environment
from benchmarks.reporting.options import add_dtype_option
from benchmarks.reporting.rows import percentile
from tests.support import tiny_models
from tests.support.engine.spec import RunSpec, disk_transfer_config
from tests.support.workload import Workload, WorkloadRequest, WorkloadResult

VOCABULARY = 1024
SHAPE = tiny_models.Gemma3Shape(
    hidden_size=256, num_layers=12, num_heads=8, num_kv_heads=8, head_dim=128, intermediate_size=512,
    vocab_size=VOCABULARY,
)  # fmt: skip
"""Short steps, and a cache that is large beside the work of computing it: 48 KiB per token in bfloat16."""
DECODING_PROMPT_TOKENS = 100
FIRST_ARRIVAL = 20
"""Step before which the first of the other requests arrives; all decoding requests have their first token by then."""
CHUNK_TOKENS = 256
STORED_SEED, NEW_SEED = 1, 1000

Part = Literal["stores", "loads", "both"]
PARTS: tuple[Part, ...] = get_args(Part)
CONTENDERS = ("none", "threads", "process")
ALONE = "alone"
COMPARED = (
    ("threads", "none"), ("process", "none"), ("process", "threads"), ("threads", ALONE), ("process", ALONE),
)  # fmt: skip


class Turn(NamedTuple):
    """One contender's figures of one turn.

    Args:
        moved_mib: bytes that were stored and loaded, in MiB.
        seconds: length of the measured time.
    """

    tokens_per_second: float
    p50_ms: float
    p99_ms: float
    moved_mib: float
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Requests of a turn.

    Args:
        decoding: number of decoding requests.
        output_tokens: tokens that each of them generates.
        prompt_tokens: length of the other prompts.
        every: steps between the arrivals of two of them.
    """

    decoding: int
    output_tokens: int
    prompt_tokens: int
    every: int

    @property
    def arrivals(self) -> range:
        """Steps before which the other requests arrive; the last one has time to be served."""
        return range(FIRST_ARRIVAL, self.output_tokens - self.every, self.every)

    def workload(self, part: Part | None, round_number: int) -> Workload:
        """Return the requests of a turn. Prompts to load are the same in all rounds, all others are new."""
        requests = [
            self._request(f"decoding {number}", DECODING_PROMPT_TOKENS, 0, number, self.output_tokens)
            for number in range(self.decoding)
        ]
        for number, step in enumerate(self.arrivals if part else ()):
            stored = part == "loads" or (part == "both" and number % 2 == 1)
            seed = STORED_SEED if stored else NEW_SEED + PARTS.index(part or "stores") + len(PARTS) * round_number
            name = f"{'stored' if stored else 'new'} {number}"
            requests.append(self._request(name, self.prompt_tokens, seed, number, 1, step))
        return Workload(name=f"{part}, round {round_number}", requests=requests)

    @staticmethod
    def _request(name: str, length: int, seed: int, member: int, outputs: int, step: int = 0) -> WorkloadRequest:
        tokens = tiny_models.prompt_token_ids(length, seed=seed, vocab_size=VOCABULARY, member=member)
        return WorkloadRequest(name=name, token_ids=tokens, max_tokens=outputs, arrival_step=step)


def specs(model: Path, folder: Path, dtype: str) -> dict[str, RunSpec]:
    """Return the engine of each contender."""
    modes = {"threads": "off", "process": "engine"}
    transfers = {
        name: disk_transfer_config(folder / name, io_process=mode, hybrid_chunk_size=CHUNK_TOKENS)
        for name, mode in modes.items()
    }
    return {
        name: RunSpec(
            model=str(model), dtype=dtype, max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=16,
            kv_cache_memory_bytes=1 << 30, kv_transfer_config=transfers.get(name),
        )
        for name in CONTENDERS
    }  # fmt: skip


def take_turn(engine: LiveEngine, name: str, workload: Workload, traffic: Traffic) -> Turn:
    """Run the requests on an engine and return its figures."""
    before = moved_bytes(engine)
    result = engine.tell(Order(workload=workload)).workload
    assert result is not None
    moved = moved_bytes(engine) - before
    check_service(name, result)
    times = [request.token_seconds for request in result.requests[: traffic.decoding]]
    started, ended = max(seconds[0] for seconds in times), min(seconds[-1] for seconds in times)
    within = [[second for second in seconds if started <= second <= ended] for seconds in times]
    gaps = [1e3 * (later - earlier) for seconds in within for earlier, later in itertools.pairwise(seconds)]
    return Turn(
        len(gaps) / (ended - started), percentile(gaps, 50), percentile(gaps, 99), moved / 2**20, ended - started
    )


def settle(folder: Path, loaded: Collection[Path]) -> None:
    """Write all dirty pages, and keep only the objects that are loaded again in the page cache."""
    os.sync()
    for path in objects_in(folder) - set(loaded):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def objects_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*.kv"))


def moved_bytes(engine: LiveEngine) -> float:
    """Return the bytes that the engine's tiers have stored and loaded."""
    metrics = engine.tell(Order(metrics=True)).metrics or {}
    names = ("vllm:hybrid_offload_store_bytes_total", "vllm:hybrid_offload_load_bytes_total")
    return sum(value for name, value in metrics.items() if name.startswith(names))


def check_service(name: str, result: WorkloadResult) -> None:
    """Stop if a prompt was not served as its contender's: the figures would compare different work."""
    for request in result.requests:
        cached = request.local_cached_tokens + request.external_cached_tokens
        loads = request.name.startswith("stored") and name != "none"
        expected = (request.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS if loads else 0
        if cached != expected:
            raise SystemExit(f"{name}: a cache served {cached} tokens of {request.name}, and not {expected}")
        if request.preemptions:
            raise SystemExit(f"{name}: {request.name} was preempted; the KV cache is too small")


def run_rounds(
    live: Mapping[str, LiveEngine], traffic: Traffic, parts: Sequence[Part], rounds: int, folder: Path, console: Console
) -> dict[tuple[str, str], list[Turn]]:
    """Return the turns of each part and contender, after a round that warms everything up."""
    fill(live, traffic)
    loaded = objects_in(folder)
    chance = random.Random(1)
    turns: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    for number in range(-1, rounds):
        jobs: list[tuple[Part | None, str]] = [(None, ALONE)]
        for each in parts:
            jobs += [(each, name) for name in chance.sample(CONTENDERS, len(CONTENDERS))]
        for part, name in jobs:
            workload = traffic.workload(part, number)
            settle(folder, loaded)
            turn = take_turn(live["none" if part is None else name], name, workload, traffic)
            if number >= 0:
                turns[part or ALONE, name].append(turn)
        console.print("everything is warm" if number < 0 else f"round {number + 1} of {rounds} is done")
    return turns


def fill(live: Mapping[str, LiveEngine], traffic: Traffic) -> None:
    """Let the engines with a tier store the prompts that they load later."""
    stored = traffic.workload("loads", -1)
    for name in ("threads", "process"):
        live[name].tell(Order(workload=stored))


def figures_table(parts: Sequence[Part], turns: Mapping[tuple[str, str], Sequence[Turn]], title: str) -> Table:
    table = _table(title, "others", "contender", "tokens/s p50", "p10", "p90", "ms p50", "ms p99", "MiB/s moved")
    rows = [(ALONE, ALONE), *((part, name) for part in parts for name in CONTENDERS)]
    for part, name in rows:
        mine = turns[part, name]
        table.add_row(
            "" if part == name else part,
            name,
            *(f"{percentile([turn.tokens_per_second for turn in mine], at):.0f}" for at in (50, 10, 90)),
            f"{percentile([turn.p50_ms for turn in mine], 50):.1f}",
            f"{percentile([turn.p99_ms for turn in mine], 50):.1f}",
            f"{percentile([turn.moved_mib / turn.seconds for turn in mine], 50):.0f}",
        )
    return table


def ratios_table(parts: Sequence[Part], turns: Mapping[tuple[str, str], Sequence[Turn]]) -> Table:
    title = "Ratios of the same round: p50 (p10 to p90) over rounds"
    table = _table(title, "others", "compared", "tokens/s", "time between tokens, p50", "time between tokens, p99")
    for part in parts:
        for one, other in COMPARED:
            theirs = turns[ALONE if other == ALONE else part, other]
            pairs = list(zip(turns[part, one], theirs, strict=True))
            table.add_row(
                part,
                f"{one} / {other}",
                _spread([mine.tokens_per_second / base.tokens_per_second for mine, base in pairs]),
                _spread([mine.p50_ms / base.p50_ms for mine, base in pairs]),
                _spread([mine.p99_ms / base.p99_ms for mine, base in pairs]),
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place > 1 else "left", no_wrap=True)
    return table


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (percentile(values, at) for at in (10, 50, 90))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--decoding", type=int, default=4, help="requests that decode all the time")
    parser.add_argument("--output-tokens", type=int, default=300, help="tokens that each of them generates in a turn")
    parser.add_argument("--prompt-tokens", type=int, default=1100, help="length of the other requests' prompts")
    parser.add_argument("--every", type=int, default=12, help="steps from one of them to the next")
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    parser.add_argument("--threads", type=int, default=1, help="threads on which the model computes")
    add_dtype_option(parser)
    parser.add_argument("--folder", type=Path, help="folder for the tiers; some 4 GB for each round")
    arguments = parser.parse_args()
    console = Console(width=130)
    traffic = Traffic(arguments.decoding, arguments.output_tokens, arguments.prompt_tokens, arguments.every)
    parts: Sequence[Part] = PARTS if arguments.only is None else (arguments.only,)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with (
        tempfile.TemporaryDirectory(prefix="offload-core-bench-", dir=arguments.folder) as name,
        ExitStack() as stack,
    ):
        folder = Path(name)
        model = tiny_models.write_gemma3(folder / "model", dtype=arguments.dtype, shape=SHAPE)
        contenders = specs(model, folder, arguments.dtype)
        prepare_environment(contenders["none"])
        live = {name: LiveEngine(name, spec, folder) for name, spec in contenders.items()}
        for engine in live.values():
            stack.callback(engine.stop)
        for engine in live.values():
            engine.wait_until_started()
        turns = run_rounds(live, traffic, parts, arguments.rounds, folder, console)
    title = (
        f"{traffic.decoding} requests decode; a prompt of {traffic.prompt_tokens} tokens arrives every "
        f"{traffic.every} steps; ms are the time between tokens"
    )
    console.print(figures_table(parts, turns, title))
    console.print(ratios_table(parts, turns))


if __name__ == "__main__":
    main()
