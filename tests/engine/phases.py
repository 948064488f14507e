"""One engine that is asked the same prompts again and again, while something else happens to its storage each time."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engine.lab import Lab, served
from tests.support.engine.spec import PromptSpec, Round, RunResult, compare


def nothing() -> None:
    """Do what an engine without faults needs."""


@dataclass(frozen=True)
class Phase:
    """A round of the prompts with an empty local prefix cache.

    Args:
        action: done before it, while the engine has nothing to do.
        served: whether the storage serves every prompt (``True``) or none; ``None`` where that is not known.
    """

    name: str
    action: Callable[[], None] = nothing
    served: bool | None = None


@dataclass
class PhasedRun:
    """What one engine is asked, and what it has answered.

    Args:
        prompts: the last one's name is unique.
        phases: names are unique.
        lines: gets what the engine's process prints and logs.
    """

    lab: Lab
    prompts: Sequence[PromptSpec]
    phases: Sequence[Phase]
    lines: list[str] = field(default_factory=list)

    def run(self, transfer: dict[str, Any], env: dict[str, str] | None = None, **engine: Any) -> RunResult:
        """Run the phases on a new engine; fail where an action did, an output is wrong or service is not as told."""
        later = {before.name: phase for before, phase in itertools.pairwise(self.phases)}
        errors: list[BaseException] = []
        with tempfile.TemporaryDirectory(prefix="phases-") as folder:
            begins = {phase.name: Path(folder, f"{number}") for number, phase in enumerate(self.phases)}

            def progress(fields: dict[str, Any]) -> None:
                phase = later.get(fields["round"])
                if phase is None or fields["name"] != self.prompts[-1].name:
                    return
                try:
                    phase.action()
                except BaseException as error:  # on a thread that nobody asks
                    errors.append(error)
                begins[phase.name].touch()

            self.phases[0].action()
            begins[self.phases[0].name].touch()
            rounds = [self._round(name, begin_file=str(file)) for name, file in begins.items()]
            result = self.lab.run(rounds, transfer, env, on_progress=progress, on_line=self.lines.append, **engine)
        assert errors == []
        assert compare(self._alone(**engine), result) == []
        for index, phase in enumerate(self.phases):
            tokens = served(result, index)
            if phase.served is not None:
                assert set(map(bool, tokens.values())) == {phase.served}, (phase.name, tokens)
        return result

    def slowest_seconds(self, result: RunResult, phase: str) -> float:
        """Return the longest time to a first token in a phase."""
        (answers,) = (item for item in result.rounds if item.name == phase)
        return max(prompt.ttft_seconds for prompt in answers.prompts)

    def _round(self, name: str, **keys: Any) -> Round:
        return Round(name=name, prompts=list(self.prompts), reset_prefix_cache_before=True, **keys)

    def _alone(self, **engine: Any) -> RunResult:
        """What an engine without offloading answers: in each phase the same."""
        reference = self.lab.reference([self._round("alone")], **engine)
        (alone,) = reference.rounds
        return reference.model_copy(
            update={"rounds": [alone.model_copy(update={"name": phase.name}) for phase in self.phases]}
        )
