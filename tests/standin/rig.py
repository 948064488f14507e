"""Engines on one folder of objects, whose I/O follows a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.standin.scripted_disk import SCRIPTS, Script
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import StandInModel
from tests.support.standin.io import CallWatch
from tests.support.standin.workload import Arrival, Workload, drive, reference

NEVER_SECONDS = 600.0
_DRAIN_STEPS = 200


class Rig:
    """A maker of engines on one folder, one lifetime after the other; their I/O goes on step by step."""

    def __init__(self, model_folder: Path, kv: Path, watch: CallWatch, name: str) -> None:
        self._model_folder = model_folder
        self.kv = kv
        self._watch = watch
        self._name = name
        self.script = Script(0)
        self._engines: list[StandInEngine] = []
        self.after_tick: Callable[[], None] = lambda: None
        """Called after the I/O of each step."""
        self.before_drain: Callable[[], None] = lambda: None
        """Called before everything has to end."""

    def scripted_disk(self, name: str = "disk") -> dict[str, object]:
        """The disk tier whose I/O follows the script. Each name has a folder of its own."""
        folder = self.kv if name == "disk" else self.kv.parent / name
        return {"name": name, "type": "scripted-disk", "path": str(folder), "script": self._name}

    def engine(self, model: StandInModel, script: Script | None = None, **changes: Any) -> StandInEngine:
        """Start an engine; ``changes`` are settings of the connector or arguments of :class:`StandInEngine`."""
        self.script = SCRIPTS[self._name] = script or Script(0)
        settings = self.settings(model, changes)
        folder = changes.pop("folder", self._model_folder)
        engine = StandInEngine(model, folder, settings, **changes)
        self._engines.append(engine)
        return engine

    def engine_of_several(
        self, model: StandInModel, connectors: list[dict[str, Any]], script: Script | None = None, **limits: Any
    ) -> StandInEngine:
        """Start an engine with a ``WeightedMultiConnector``; ``limits`` are further keys of it."""
        self.script = SCRIPTS[self._name] = script or Script(0)
        extra_config = {"connectors": connectors, "lookup_timeout_seconds": NEVER_SECONDS, **limits}
        engine = StandInEngine(
            model,
            self._model_folder,
            {},
            kv_connector="WeightedMultiConnector",
            kv_connector_extra_config=extra_config,
        )
        self._engines.append(engine)
        return engine

    def settings(self, model: StandInModel, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of our connector, and remove those from ``changes`` that are among them."""
        settings: dict[str, Any] = {
            # by default a script decides on the calls, and their threads are watched
            "io_process": changes.pop("io_process", "off"),
            "backends": changes.pop("backends", [self.scripted_disk()]),
            "staging_bytes": changes.pop("staging_bytes", "32MiB"),
            "load_timeout_seconds": changes.pop("load_timeout_seconds", NEVER_SECONDS),
            "lookup_timeout_seconds": changes.pop("lookup_timeout_seconds", NEVER_SECONDS),
            "shutdown_timeout_seconds": changes.pop("shutdown_timeout_seconds", 5.0),
        }
        for key in (
            "geometry_file",
            "model_identity",
            "device_buffer_bytes",
            "kv_events_resync_seconds",
            "placement",
            "retained_share_per_tenant",
        ):
            if key in changes:
                value = changes.pop(key)
                settings[key] = str(value) if isinstance(value, Path) else value
        if "sync_load_budget_bytes" in changes:
            settings["sync_load_budget_bytes"] = changes.pop("sync_load_budget_bytes")
        if model.hybrid_chunk_size is not None:
            settings["hybrid_chunk_size"] = model.hybrid_chunk_size
        return settings

    def bare_engine(self, model: StandInModel, **changes: Any) -> StandInEngine:
        """Start an engine without a connector."""
        engine = StandInEngine(model, self._model_folder, None, **changes)
        self._engines.append(engine)
        return engine

    def tick(self) -> None:
        """Let the I/O of one step happen."""
        self._watch.settle()
        self.script.advance(self._watch.settle)
        self.after_tick()

    def open(self, *kinds: str) -> None:
        """Stop holding calls of these kinds; by default of all kinds."""
        self._watch.settle()
        self.script.open(self._watch.settle, *kinds)

    def drive(self, engine: StandInEngine, work: Workload) -> dict[str, Arrival]:
        """Run the work to its end and check that the engine has released everything."""
        asked = drive(engine, work, self.tick)
        self.drain(engine)
        return asked

    def run(self, engine: StandInEngine, *prompts: list[int], max_tokens: int = 4) -> list[str]:
        """Run some prompts at once to their end; returns the requests' ids."""
        work = Workload(0, tuple(Arrival(0, tuple(prompt), max_tokens) for prompt in prompts))
        return list(self.drive(engine, work))

    def run_again(self, engine: StandInEngine, prompt: list[int]) -> int:
        """Run a prompt that has left the prefix cache; return the number of its tokens that were loaded."""
        assert engine.scheduler.reset_prefix_cache()
        (request,) = self.run(engine, prompt)
        assert engine.outputs[request] == reference(tuple(prompt), 4)
        return engine.served[request].external_tokens

    def step_until(self, engine: StandInEngine, happened: Callable[[], object], max_steps: int = 200) -> None:
        """Step until ``happened`` returns something true."""
        for _ in range(max_steps):
            if happened():
                return
            engine.step()
            self.tick()
        raise AssertionError(f"did not happen in {max_steps} steps; requests: {engine.states()}")

    def drain(self, engine: StandInEngine) -> None:
        """Let everything end, and check that the engine has released everything."""
        self.before_drain()
        self._finish(engine)
        self.open()
        for _ in range(_DRAIN_STEPS):  # a step may end with the begin of stores that have waited
            were_pending = engine.stores_pending
            engine.add([3], 1)  # an idle engine releases late arrivals in its next step
            self._finish(engine)
            if not were_pending and not engine.stores_pending:
                break
        left = engine.leftovers()
        assert left == [], f"left over: {left}"

    def _finish(self, engine: StandInEngine) -> None:
        while engine.busy:
            engine.step()
            self.tick()

    def end(self, engine: StandInEngine) -> None:
        """Shut one engine down."""
        self._engines.remove(engine)
        engine.shutdown()

    def close(self) -> None:
        """Shut all engines down."""
        self.open()
        for engine in self._engines:
            engine.shutdown()
        self._engines.clear()
        SCRIPTS.pop(self._name, None)
