"""Engines that live at the same time, each in a process of its own, of which one works at a time.

So all engines see the same machine within a fraction of a second, and drift cancels.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import faults_plugin
from tests.support.engine.spec import PromptResult, PromptSpec, Round, RunSpec, run_environment
from tests.support.workload import Workload, WorkloadResult

START_SECONDS = 180.0
ANSWER_SECONDS = 120.0
STOP_SECONDS = 30.0
DISTRIBUTION = "benchmark-faults"


@dataclass(frozen=True)
class LoadBatch:
    """Batch of objects that a tier has loaded and checked."""

    tier: str
    loaded: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Order:
    """Order to an engine's process, which executes all parts that are set, in this order.

    Args:
        fault: the fault of the victim's medium from now on: ``none``, ``hung``, ``slow`` with a number of seconds, or
            ``far`` with a number of seconds and one of bytes per second.
        prompts: requests to submit together.
        keeps_prefix_cache: leave the engine's own prefix cache as it is; by default it is emptied before ``prompts``.
        workload: requests that arrive step by step, after emptying the engine's own prefix cache.
        metrics: whether the answer holds the present value of every metric.
    """

    fault: tuple[str, *tuple[float, ...]] | None = None
    prompts: Sequence[PromptSpec] = ()
    keeps_prefix_cache: bool = False
    workload: Workload | None = None
    metrics: bool = False


@dataclass(frozen=True)
class Answer:
    """Reply of an engine's process to an order."""

    prompts: Sequence[PromptResult] = ()
    workload: WorkloadResult | None = None
    loads: Sequence[LoadBatch] = ()
    metrics: dict[str, float] | None = None


class LiveEngine:
    """An engine in a process of its own, which executes orders until it is stopped.

    Args:
        site: the folder of :func:`write_distribution`.
    """

    def __init__(self, name: str, spec: RunSpec, site: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        log = str(site / f"{name.replace(' ', '-')}.log")
        self._process = context.Process(target=_serve, args=(theirs, spec, str(site), log), daemon=True)
        self._log = Path(log)
        self._process.start()
        theirs.close()

    def wait_until_started(self) -> None:
        """Wait for the engine.

        Raises:
            RuntimeError: the engine did not start; the message ends with the last lines of its output.
        """
        self._receive(START_SECONDS)

    def tell(self, order: Order) -> Answer:
        """Send an order and wait for the answer.

        Raises:
            RuntimeError: the process has ended or does not answer.
        """
        self._connection.send(order)
        return self._receive(ANSWER_SECONDS)

    def stop(self) -> None:
        """Stop the engine, and kill it if it does not end in time."""
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(STOP_SECONDS)
        self._process.kill()
        self._process.join()

    def _receive(self, seconds: float) -> Answer:
        try:
            if self._connection.poll(seconds):
                answer = self._connection.recv()
                assert isinstance(answer, Answer)
                return answer
            problem = f"has not answered for {seconds:g} s"
        except (EOFError, OSError):
            problem = "has ended"
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"the engine {self.name!r} {problem}; the last lines of its output:\n{tail}")


def write_distribution(site: Path) -> None:
    """Install the plugin in the folder ``site``, for processes with this folder on their search path."""
    info = site / f"{DISTRIBUTION.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[offload_core]\n{DISTRIBUTION} = {faults_plugin.__name__}\n")


def prepare_environment(spec: RunSpec) -> None:
    """Set the environment variables that the engines' processes need from their first import on."""
    os.environ.update({**run_environment(spec), **os.environ})


@contextmanager
def running(specs: Mapping[str, RunSpec], folder: Path) -> Iterator[dict[str, LiveEngine]]:
    """Start an engine for each spec, all at once, and stop them afterwards.

    Args:
        folder: a place for the plugin and the logs; one for each call.
    """
    site = folder / "site"
    write_distribution(site)
    prepare_environment(next(iter(specs.values())))
    with ExitStack() as stack:
        engines = {name: LiveEngine(name, spec, site) for name, spec in specs.items()}
        for engine in engines.values():
            stack.callback(engine.stop)
        for engine in engines.values():
            engine.wait_until_started()
        yield engines


def _serve(connection: Connection, spec: RunSpec, site: str, log: str) -> None:
    with open(log, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor for all output of the process
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.path.insert(0, site)
    os.environ[faults_plugin.ADDRESS] = f"{log}.socket"
    from tests.support.engine.engine_run import Session, start_engine, stop_engine

    engine = start_engine(spec)
    try:
        session = Session(engine, spec.logprobs)
        session.warm_up()
        connection.send(Answer())
        for number in itertools.count():
            order = _next_order(connection)
            if order is None:
                break
            connection.send(_do(session, number, order))
        faults_plugin.inject("none")
    finally:
        stop_engine(engine)


def _next_order(connection: Connection) -> Order | None:
    """Return the next order, or ``None`` if the engine must end."""
    try:
        order = connection.recv()
    except EOFError:
        return None
    assert order is None or isinstance(order, Order)
    return order


def _do(session: Any, number: int, order: Order) -> Answer:
    from tests.support.engine.engine_run import engine_metrics

    if order.fault is not None:
        faults_plugin.inject(*order.fault)
    prompts: Sequence[PromptResult] = ()
    if order.prompts:
        batch = Round(
            name="batch",
            prompts=list(order.prompts),
            reset_prefix_cache_before=not order.keeps_prefix_cache,
            one_at_a_time=False,
        )
        prompts = session.run_round(number, batch).prompts
    workload = None if order.workload is None else session.run_workload(order.workload)
    loads = [LoadBatch(one.tier, one.loaded, one.nbytes, one.seconds) for one in faults_plugin.take_loads()]
    return Answer(prompts, workload, loads, engine_metrics() if order.metrics else None)
