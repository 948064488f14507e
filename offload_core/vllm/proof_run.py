"""One engine of ``offload-core prove``, in a process of its own.

python -m offload_core.vllm.proof_run SPEC.json RESULT.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from offload_core.api.errors import ConfigError, PlanError
from offload_core.cli.proof.documents import PROGRESS_LINE, REFUSED, Answer, EngineResult, EngineSpec, Pass
from offload_core.cli.proof.prompts import ANSWER_TOKENS, prompt, prompt_lengths
from offload_core.vllm.model.groups import build_planner
from offload_core.vllm.prefill_stats import keep_prefill_stats

_LOGPROBS = 5
_DRAIN_SECONDS = 300.0
_PAUSE_SECONDS = 0.01


class _RefusedError(Exception):
    """The engine cannot run as asked."""


def run(spec: EngineSpec) -> EngineResult:
    """Run the passes of ``spec`` on one engine.

    Raises:
        ConfigError, PlanError: offloading refuses the model or its settings.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(_engine_args(spec))
    try:
        core = engine.engine_core.engine_core
        config = engine.vllm_config
        prompts = spec.prompts or _prompts(config, core.scheduler.kv_cache_config, spec.chunk_size)
        session = _Session(engine, core)
        answers = {item.name: session.run(item, prompts) for item in spec.passes}
        connector = core.scheduler.connector
        fingerprints = [] if connector is None else list(connector.fingerprints)
        precision = torch.finfo(config.model_config.dtype).eps
    finally:
        engine.engine_core.shutdown(timeout=_DRAIN_SECONDS)
    return EngineResult(prompts=prompts, answers=answers, precision=precision, fingerprints=fingerprints)


def _engine_args(spec: EngineSpec) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="offload-core prove"))
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", spec.model, *spec.arguments]))
    if args.kv_transfer_config is not None:
        raise _RefusedError("--kv-transfer-config: the command sets it itself; name the configuration by --config")
    if args.enable_prefix_caching is None:
        args.enable_prefix_caching = True
    if args.disable_hybrid_kv_cache_manager is None:
        args.disable_hybrid_kv_cache_manager = False
    args.disable_log_stats = False
    args.shutdown_timeout = int(_DRAIN_SECONDS)
    if spec.offload is not None:
        args.kv_transfer_config = KVTransferConfig(
            kv_connector="HybridOffloadConnector",
            kv_connector_module_path="offload_core.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=spec.offload,
        )
    return args


def _prompts(config: Any, kv_cache_config: Any, chunk_size: int | None) -> list[list[int]]:
    planner = build_planner(config, kv_cache_config, chunk_size)
    windows = [pack.policy.window_tokens for pack in planner.packs if pack.policy.kind == "window"]
    model_tokens = config.model_config.max_model_len
    lengths = prompt_lengths(planner.boundary_tokens, windows, model_tokens)
    if not lengths:
        raise _RefusedError(
            f"no prompt of one chunk ({planner.boundary_tokens} tokens) and its answer fits into max_model_len = "
            f"{model_tokens}; raise --max-model-len, or lower hybrid_chunk_size"
        )
    vocabulary = config.model_config.get_vocab_size()
    return [prompt(length, vocabulary) for length in lengths]


class _Session:
    """Sends prompts to an engine whose core runs in this process."""

    def __init__(self, engine: Any, core: Any) -> None:
        self._engine = engine
        self._core = core
        self._prefill = keep_prefill_stats(engine.engine_core)

    def run(self, item: Pass, prompts: list[list[int]]) -> list[Answer]:
        """Run all prompts once, and step the engine until its stores have ended."""
        if item.reset:
            self._reset()
        batches = [list(enumerate(prompts))] if item.together else [[one] for one in enumerate(prompts)]
        answers: dict[int, Answer] = {}
        for batch in batches:
            self._run_batch(item.name, batch, answers)
            self._drain()
        return [answers[place] for place in range(len(prompts))]

    def _run_batch(self, name: str, batch: list[tuple[int, list[int]]], answers: dict[int, Answer]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=_LOGPROBS, detokenize=False
        )
        names = {
            place: str(self._engine.add_request(f"{name}.{place}", {"prompt_token_ids": tokens}, params))
            for place, tokens in batch
        }
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    place = int(output.request_id.rsplit(".", 1)[1])
                    answers[place] = _answer(output, self._prefill.pop(names[place]))
                    print(PROGRESS_LINE, flush=True)

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._engine.step()
            if time.monotonic() > deadline:
                raise RuntimeError(f"stores have not ended within {_DRAIN_SECONDS:g} s")

    def _reset(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not self._engine.reset_prefix_cache():
            self._drain()
            time.sleep(_PAUSE_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError("vLLM refused to reset its prefix cache, because blocks are in use")


def _answer(output: Any, stats: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        tokens=list(completion.token_ids),
        logprobs=[{token: float(entry.logprob) for token, entry in place.items()} for place in completion.logprobs],
        local_tokens=stats.num_local_cached_tokens,
        tier_tokens=stats.num_external_cached_tokens,
    )


def main(arguments: list[str]) -> int:
    """Run the spec file ``arguments[0]``, write the result file ``arguments[1]``, return the exit code."""
    spec = EngineSpec.model_validate_json(Path(arguments[0]).read_text())
    try:
        result = run(spec)
    except (ConfigError, PlanError, _RefusedError) as error:
        print(" ".join(str(error).split()), flush=True)
        return REFUSED
    Path(arguments[1]).write_text(result.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
