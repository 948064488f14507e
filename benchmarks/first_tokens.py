"""Times to the first token of engines that live at once and take turns with each prompt.

Before each turn the machine rests, and the engine computes a few tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.live_engines import LiveEngine, Order
from benchmarks.reporting.document import add_json_option
from benchmarks.reporting.options import add_dtype_option
from benchmarks.reporting.rows import FirstToken, percentile
from tests.support import tiny_models
from tests.support.engine.spec import PromptResult, PromptSpec, RunSpec

PROMPT_TOKENS = 3900
VOCABULARY = 4096
MAX_LOGPROB_GAP = 0.1
WARM_UP_ROUNDS = 2
WAKE_TOKENS = 16
"""Tokens of the prompt before each measured one, too few for a block."""
REST_SECONDS = 0.6
"""Rest before each turn, so that no thread of another engine is still at work."""
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "TORCHDYNAMO_DISABLE": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
}
"""Threads and compilation of a server."""
LOCAL = "local prefix cache"


def prepare() -> None:
    """Set the environment of the engines of this process: threads and compilation as of a server."""
    os.environ.update(SERVER_ENVIRONMENT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark of first tokens."""
    parser.add_argument("--prompts", type=int, default=8, help="number of different prompts")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each prompt that a cache serves")
    add_dtype_option(parser)
    add_json_option(parser)


def run_spec(model: Path, dtype: str, transfer: dict[str, Any] | None) -> RunSpec:
    """Return an engine that holds the KV caches of all prompts, with a connector or without."""
    return RunSpec(
        model=str(model), dtype=dtype, max_model_len=4096, max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 30, kv_transfer_config=transfer,
    )  # fmt: skip


def prompts_of(count: int) -> list[PromptSpec]:
    """Return different prompts of :data:`PROMPT_TOKENS` tokens."""
    return [_prompt_of(str(seed), PROMPT_TOKENS, seed) for seed in range(count)]


def _prompt_of(name: str, tokens: int, seed: int) -> PromptSpec:
    token_ids = tiny_models.prompt_token_ids(tokens, seed=seed, vocab_size=VOCABULARY)
    return PromptSpec(name=name, token_ids=token_ids, max_tokens=2)


class Turns:
    """Engines that answer prompts in turns, and the answers that are measured.

    The model may run in bfloat16. There a prefill from a prefix rounds differently from a whole one, with and without
    offloading. So the log probabilities may differ by up to :data:`MAX_LOGPROB_GAP` from those of the recompute.
    """

    def __init__(self, live: Mapping[str, LiveEngine]) -> None:
        self._live = live
        self._wake = _prompt_of("wake", WAKE_TOKENS, seed=10_000)
        self._chance = random.Random(1)
        self._computed: dict[str, PromptResult] = {}
        self.answers: dict[str, list[PromptResult]] = defaultdict(list)

    def ask(self, engine: str, row: str, prompt: PromptSpec) -> None:
        """Let an engine answer a prompt, for a row of the table; see :meth:`add`."""
        keeps = engine == LOCAL
        time.sleep(REST_SECONDS)
        self._live[engine].tell(Order(prompts=[self._wake], keeps_prefix_cache=keeps))
        (answer,) = self._live[engine].tell(Order(prompts=[prompt], keeps_prefix_cache=keeps)).prompts
        self.add(row, answer)

    def add(self, row: str, answer: PromptResult) -> None:
        """Add an answer to a row. The first answer to a prompt is the one that the others must match.

        Raises:
            SystemExit: the first token differs from the recomputed one: a fast wrong answer is no result.
        """
        wanted = self._computed.setdefault(answer.name, answer)
        gap = abs(answer.logprobs[0] - wanted.logprobs[0])
        if answer.token_ids[0] != wanted.token_ids[0] or gap > MAX_LOGPROB_GAP:
            raise SystemExit(f"{row}: prompt {answer.name} starts with another token or probability than recomputed")
        self.answers[row].append(answer)

    def ask_all(self, rows: Mapping[str, str], prompts: Sequence[PromptSpec]) -> None:
        """Let engines answer prompts in turns.

        Args:
            rows: the row of each engine that takes part.
        """
        for prompt in prompts:
            for engine in self._chance.sample(list(rows), len(rows)):
                self.ask(engine, rows[engine], prompt)


def row_of(name: str, answers: Sequence[PromptResult], base_ms: float | None = None) -> FirstToken:
    """Return the row of some answers; its ratio is to the median ``base_ms``, by default to its own median."""
    p50, p90, p99 = (percentile([1e3 * answer.ttft_seconds for answer in answers], at) for at in (50, 90, 99))
    return FirstToken(
        name=name,
        served_tokens=min(answer.external_cached_tokens + answer.local_cached_tokens for answer in answers),
        samples=len(answers),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        ratio=p50 / (base_ms or p50),
    )
