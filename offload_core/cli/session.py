"""The tiers of a configuration, opened for one command, and a report of each.

The coroutines of a command run on the I/O loop, a daemon thread, as those of the engine do. The main thread waits. A
hung medium, or a backend that blocks the loop, can therefore never keep a command from ending, and Ctrl-C always works.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import typer

from offload_core.api.errors import ConfigError, did_you_mean
from offload_core.cli.output import note, print_json
from offload_core.cli.tier_client import OperationError, TierClient
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.plugins.loading import PLUGIN_ERRORS
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.opening import close_tiers

EXIT_TROUBLE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_BLOCKED_LOOP_SECONDS = 10.0

R = TypeVar("R")
T = TypeVar("T")


@dataclass
class TierReport(Generic[R]):
    """The report of one tier. After an ``error``, ``result`` holds the findings up to that error."""

    tier: str
    type: str
    result: R
    error: str | None = None
    skipped: str | None = None
    """The reason why the command skipped this tier."""
    note: str | None = None
    open_seconds: float | None = None

    def document(self, **fields: object) -> dict[str, object]:
        """Return the report as a JSON object, with the command's own ``fields``."""
        return {"tier": self.tier, "error": self.error, "skipped": self.skipped, "note": self.note, **fields}


class Session:
    """The selected tiers of one configuration."""

    def __init__(self, config: OffloadConfig, tiers: Sequence[TierConfig], io: IoLoop) -> None:
        self.settings = config.settings
        self.configs = tiers
        self._config = config
        self._io = io
        self._opened: list[TierClient] = []

    @property
    def cleanup_seconds(self) -> float:
        """Time limit of each clean-up step after a failure or an interruption."""
        return max(1.0, self.settings.shutdown_timeout_seconds)

    def run_on_each_tier(
        self,
        work: Callable[[TierClient, R], Awaitable[None]],
        new_result: Callable[[], R],
        *,
        lists: bool = False,
        one_by_one: bool = False,
    ) -> list[TierReport[R]]:
        """Open every tier and run ``work`` on it. A failure of one tier does not stop the others.

        Args:
            work: fills the result. The result is reported even if ``work`` raises :class:`OperationError`.
            new_result: returns an empty result.
            lists: skip tiers whose backend cannot list its objects.
            one_by_one: never work on two tiers at the same time.

        Raises:
            typer.Exit: on Ctrl-C or SIGTERM, after ``work`` was cancelled and has ended.
        """
        reports = [TierReport(config.common.name, config.common.type, new_result()) for config in self.configs]
        jobs: list[tuple[TierClient, TierReport[R]]] = []
        for config, report in zip(self.configs, reports, strict=True):
            try:
                tier = TierClient(config, self._config)
            except PLUGIN_ERRORS as error:
                report.error = f"construct: {type(error).__name__}: {error}"
                continue
            self._opened.append(tier)
            if lists and not tier.capabilities.lists:
                report.skipped = f"the backend type {tier.type_name!r} does not list its objects"
                continue
            if not (tier.capabilities.persistent or tier.capabilities.shared):
                report.note = "keeps its objects in one process; this command sees an empty medium of its own"
            jobs.append((tier, report))
        self._run(_work_on_all(work, jobs, one_by_one=one_by_one))
        return reports

    def run_again(self, work: Callable[[TierClient, R], Awaitable[None]], reports: Sequence[TierReport[R]]) -> None:
        """Run more ``work`` on those tiers of ``reports`` that have no error and were not skipped."""
        tiers = {tier.name: tier for tier in self._opened}
        self._run(_work_on_all(work, [(tiers[r.tier], r) for r in reports if not (r.error or r.skipped)]))

    def close(self) -> None:
        """Close the tiers. The wait for hung media is short."""
        close_tiers([tier.tier for tier in self._opened], self._io)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        tasks: list[asyncio.Task[Any]] = []
        is_interrupted = False

        async def main() -> None:
            task = asyncio.current_task()
            if task is not None:
                tasks.append(task)
            if is_interrupted:  # before it began
                coroutine.close()
                raise asyncio.CancelledError
            await coroutine

        def interrupt() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            for task in tasks:
                task.cancel()

        with sigterm_interrupts():
            future = self._io.submit(main())
            try:
                self._wait_for(future)
            except KeyboardInterrupt:
                try:
                    note("interrupted: removing the objects that were written; press Ctrl-C again to leave at once")
                    self._io.loop.call_soon_threadsafe(interrupt)
                    self._wait_for(future)
                except KeyboardInterrupt:
                    note("interrupted again: objects that this command has written may be left behind")
                raise typer.Exit(EXIT_INTERRUPTED) from None

    def _wait_for(self, future: Future[None]) -> None:
        """Wait for the command's coroutine while the loop responds."""
        while not wait([future], timeout=0.5).done:
            beat = self._io.submit(asyncio.sleep(0))
            if not wait([beat, future], timeout=_BLOCKED_LOOP_SECONDS).done:
                running = [f"tier {tier.name!r}: {operation}" for tier in self._opened for operation in tier.running]
                note(
                    f"a backend has blocked the event loop for {_BLOCKED_LOOP_SECONDS:g} s, which clause C8 forbids; "
                    f"running: {'; '.join(running)}"
                )
                raise typer.Exit(EXIT_TROUBLE)
        if not future.cancelled():
            future.result()


async def _work_on_all(
    work: Callable[[TierClient, R], Awaitable[None]],
    jobs: Sequence[tuple[TierClient, TierReport[R]]],
    *,
    one_by_one: bool = False,
) -> None:
    if one_by_one:
        for tier, report in jobs:
            await _work_on_one(work, tier, report)
        return
    async with asyncio.TaskGroup() as group:
        for tier, report in jobs:
            group.create_task(_work_on_one(work, tier, report))


async def _work_on_one(
    work: Callable[[TierClient, R], Awaitable[None]], tier: TierClient, report: TierReport[R]
) -> None:
    try:
        if report.open_seconds is None:
            start = time.perf_counter()
            await tier.open()
            report.open_seconds = time.perf_counter() - start
        await work(tier, report.result)
    except OperationError as error:
        report.error = str(error)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM, which ``timeout`` and service managers send, like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def open_session(config_file: Path, tier_names: Sequence[str] | None, *, as_json: bool) -> Iterator[Session]:
    """Read the configuration and yield a session on its tiers, or on the named ones only.

    Raises:
        typer.Exit: code 2, after printing all problems of the configuration and of the names.
    """
    try:
        config = read_config(config_file)
        tiers = _selected(config, tier_names or [])
    except ConfigError as error:
        note(str(error))
        if as_json:
            print_json({"problems": list(error.problems)})
        raise typer.Exit(EXIT_USAGE) from None
    io = IoLoop.acquire()
    session = Session(config, tiers, io)
    try:
        yield session
    finally:
        session.close()
        io.release()


def read_config(config_file: Path) -> OffloadConfig:
    """Read a configuration file.

    Raises:
        ConfigError: with all problems of the file, which the message names.
    """
    try:
        return load_config({"config_file": str(config_file)})
    except ConfigError as error:
        raise ConfigError(error.problems, str(config_file)) from None


def _selected(config: OffloadConfig, names: Sequence[str]) -> list[TierConfig]:
    known = [tier.common.name for tier in config.tiers]
    problems: list[str] = []
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            problems.append(f"--tier: {name!r} is no tier of this configuration{hint}; its tiers: {', '.join(known)}")
    if problems:
        raise ConfigError(problems, "the command line")
    return [tier for tier in config.tiers if not names or tier.common.name in names]


def finish(reports: Sequence[TierReport[Any]], *, trouble: bool = False) -> None:
    """Print the problems of each tier on stderr, and end with code 1 if there are any.

    It also ends with code 1 if every tier was skipped, or if the command itself found ``trouble``.
    """
    for report in reports:
        for text in (report.note, report.skipped and f"skipped: {report.skipped}", report.error):
            if text:
                note(f"tier {report.tier!r}: {text}")
    if trouble or any(report.error for report in reports) or all(report.skipped for report in reports):
        raise typer.Exit(EXIT_TROUBLE)
