"""``offload-core prove``: text from each tier compared with text that is computed, on a user's model and settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, TierNames
from offload_core.cli.output import note, print_json, print_table, progress
from offload_core.cli.proof.comparison import Difference, TierVerdict, allowed_gap, difference, judge
from offload_core.cli.proof.documents import EngineResult, EngineSpec, Pass
from offload_core.cli.proof.engines import EngineError, EngineRefusedError, run_engine
from offload_core.cli.session import (
    EXIT_INTERRUPTED,
    EXIT_TROUBLE,
    EXIT_USAGE,
    Session,
    open_session,
    sigterm_interrupts,
)
from offload_core.cli.tier_client import TierClient
from offload_core.config.file import read_keys
from offload_core.config.model import TierConfig

_COMPUTED, _LOCAL, _TOGETHER, _STORED, _LOADED = "computed", "local", "together", "stored", "loaded"
_REFERENCE = [
    Pass(name=_COMPUTED),
    Pass(name=_LOCAL),
    Pass(name=_TOGETHER, reset=True, together=True),
]
_ONE_ENGINE_KEYS = ("geometry_file", "trace_file", "trace_file_bytes")
"""Keys that name an engine's own files."""
_LOOKUP_SECONDS = 30


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
)
def prove(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="the model, as for vllm serve; vLLM's own arguments may follow")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="the configuration file with the tiers; by default a disk tier in a temporary folder"
        ),
    ] = None,
    tier: TierNames = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove on your own model and settings that text from a tier is the text that computing gives.

    The same prompts are computed, taken from vLLM's local prefix cache, and loaded from each tier in a second process.
    The command compares tokens and log probabilities. It tells whether the tier or vLLM's own cache is at fault.

    Two computations in batches of other compositions show the effect of rounding. Only larger differences count.

    Each tier works alone, under a fingerprint of this run, and stores every object. Existing objects are never loaded.
    The objects of the run are deleted in the end, if the tier can list them. A full tier may evict older objects. The
    objects of a tier in one process's memory are loaded by the process that stored them.

    Engines start one after the other: one without tiers, and two per tier. So the model must fit beside other work.

    Exits with 1 if a tier differs, if a tier has served nothing, or if an engine fails. Exits with 2 if the proof
    cannot run, for example without vLLM.

    Example: `offload-core prove MODEL --config offload.yaml --max-model-len 8192`
    """
    if importlib.util.find_spec("vllm") is None:
        note("vLLM is not installed, and the proof needs an engine; install vllm 0.30 or newer beside offload-core")
        raise typer.Exit(EXIT_USAGE)
    with tempfile.TemporaryDirectory(prefix="offload-core-prove-") as name:
        folder = Path(name)
        if config is None:
            config = folder / "offload.json"
            backend = {"name": "disk", "type": "disk", "path": str(folder / "kv")}
            config.write_text(json.dumps({"backends": [backend]}))
        with open_session(config, tier, as_json=as_json) as session:
            proof = _Proof(model, context.args, read_keys(config), folder)
            try:
                with sigterm_interrupts():
                    spread, verdicts = proof.run(session, quiet=quiet)
            except EngineRefusedError as error:
                note(str(error))
                raise typer.Exit(EXIT_USAGE) from None
            except EngineError as error:
                note(str(error))
                raise typer.Exit(EXIT_TROUBLE) from None
            except KeyboardInterrupt:
                note("interrupted: the engine was ended")
                raise typer.Exit(EXIT_INTERRUPTED) from None
            finally:
                _delete(session, proof.fingerprints)
    if as_json:
        print_json({**spread.document(), "tiers": [_document(verdict) for verdict in verdicts]})
    else:
        print_table(["tier", "verdict", "tokens served|", "to computed|", "to local|"], map(_row, verdicts))
    note(spread.sentence())
    for verdict in verdicts:
        note(verdict.text)
    if any(verdict.fault != "none" for verdict in verdicts):
        raise typer.Exit(EXIT_TROUBLE)


@dataclasses.dataclass(frozen=True)
class _Spread:
    """The differences without any tier."""

    prompts: list[int]
    batches: Difference
    local: Difference
    local_tokens: int
    allowed: float

    def sentence(self) -> str:
        cache = f"differs by {self.local.size:.3g}" if self.local_tokens else "served nothing"
        return (
            f"{len(self.prompts)} prompts of up to {max(self.prompts)} tokens: other batches differ by "
            f"{self.batches.size:.3g}, so up to {self.allowed:.3g} is allowed; vLLM's local prefix cache {cache}"
        )

    def document(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompts,
            "allowed": self.allowed,
            "batches": _numbers(self.batches),
            "local": {**_numbers(self.local), "tokens": self.local_tokens},
        }


class _Proof:
    """The engines of one proof.

    Args:
        keys: the configuration, as it was written.
        folder: a temporary folder.
    """

    def __init__(self, model: str, arguments: list[str], keys: dict[str, Any], folder: Path) -> None:
        self._model = model
        self._arguments = arguments
        self._keys = {key: value for key, value in keys.items() if key not in _ONE_ENGINE_KEYS}
        self._folder = folder
        self._identity = f"offload-core prove {secrets.token_hex(16)}"
        self._in_one_process: set[str] = set()
        self.fingerprints: set[str] = set()

    def run(self, session: Session, *, quiet: bool) -> tuple[_Spread, list[TierVerdict]]:
        """Run one engine without tiers, then the engines of each tier.

        Raises:
            EngineError: a tier does not open, or an engine fails.
        """
        opened = session.run_on_each_tier(_nothing, lambda: None)
        if problems := [f"tier {report.tier!r}: {report.error}" for report in opened if report.error]:
            raise EngineError("\n".join(problems))
        self._in_one_process = {report.tier for report in opened if report.note}
        with progress(quiet=quiet) as bar:
            line = bar.add_task(_COMPUTED, total=None)

            def advance() -> None:
                bar.advance(line)

            reference = self._engine(None, _REFERENCE, None, advance)
            computed, local = reference.answers[_COMPUTED], reference.answers[_LOCAL]
            batches = difference(computed, reference.answers[_TOGETHER])
            allowed = allowed_gap(batches, reference.precision)
            count = len(reference.prompts)
            bar.update(line, total=count * (len(_REFERENCE) + 2 * len(session.configs)))
            verdicts = []
            for config in session.configs:
                bar.update(line, description=f"tier {config.common.name}")
                loaded = self._tier(config, reference.prompts, advance)
                verdicts.append(judge(config.common.name, computed, local, loaded.answers[_LOADED], allowed))
        lengths = [len(tokens) for tokens in reference.prompts]
        local_tokens = sum(answer.local_tokens for answer in local)
        return _Spread(lengths, batches, difference(computed, local), local_tokens, allowed), verdicts

    def _tier(self, config: TierConfig, prompts: list[list[int]], advance: Callable[[], None]) -> EngineResult:
        keys = self._tier_keys(config.common.name)
        if config.common.name in self._in_one_process:
            return self._engine(keys, [Pass(name=_STORED), Pass(name=_LOADED, reset=True)], prompts, advance)
        self._engine(keys, [Pass(name=_STORED)], prompts, advance)
        return self._engine(keys, [Pass(name=_LOADED)], prompts, advance)

    def _tier_keys(self, name: str) -> dict[str, Any]:
        """Return the configuration with this tier alone, which stores and serves all that it can."""
        backends = [{**entry, "write_policy": "every"} for entry in self._keys["backends"] if entry["name"] == name]
        return {
            **self._keys,
            "backends": backends,
            "model_identity": self._identity,
            "load_when": "always",
            "placement": "everything",
            "lookup_timeout_seconds": _LOOKUP_SECONDS,
        }

    def _engine(
        self,
        offload: dict[str, Any] | None,
        passes: list[Pass],
        prompts: list[list[int]] | None,
        advance: Callable[[], None],
    ) -> EngineResult:
        spec = EngineSpec(
            model=self._model,
            arguments=self._arguments,
            offload=offload,
            chunk_size=self._keys.get("hybrid_chunk_size"),
            prompts=prompts,
            passes=passes,
        )
        result = run_engine(spec, self._folder, advance)
        self.fingerprints.update(result.fingerprints)
        return result


async def _nothing(client: TierClient, _: object) -> None:
    """Open the tier only."""


def _delete(session: Session, fingerprints: set[str]) -> None:
    """Delete the objects of this run from the tiers that list theirs."""

    async def work(client: TierClient, _: object) -> None:
        async for batch in client.objects():
            keys = [stored.key for stored in batch if stored.key.namespace in fingerprints]
            if keys:
                await client.delete(keys)

    if fingerprints:
        for report in session.run_on_each_tier(work, lambda: None, lists=True):
            if problem := report.error or report.skipped:
                note(f"tier {report.tier!r}: objects of this run may remain: {problem}")


def _numbers(found: Difference | None) -> dict[str, object]:
    if found is None:
        return {"gap": None, "margin": None, "other_tokens": None}
    gap, margin = (value if math.isfinite(value) else None for value in (found.gap, found.margin))
    return {"gap": gap, "margin": margin, "other_tokens": found.other_tokens}


def _document(verdict: TierVerdict) -> dict[str, object]:
    return {
        "tier": verdict.tier,
        "proved": verdict.fault == "none",
        "fault": verdict.fault,
        "text": verdict.text,
        "tokens": verdict.tier_tokens,
        "from_computed": _numbers(verdict.from_computed),
        "from_local": _numbers(verdict.from_local),
    }


def _row(verdict: TierVerdict) -> list[object]:
    sizes = [f"{found.size:.3g}" if found else "-" for found in (verdict.from_computed, verdict.from_local)]
    names = {"none": "proved", "tier": "the tier's fault", "vllm": "vLLM's fault", "undecided": "differs"}
    return [verdict.tier, names[verdict.fault], verdict.tier_tokens, *sizes]
