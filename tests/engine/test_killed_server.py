"""An object store that is killed in the middle of loads and of stores, and comes back empty, under a running engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.phases import Phase, PhasedRun
from tests.engine.test_faulty_mount import settle, transfer
from tests.support.engine.lab import Lab, count
from tests.support.engine.spec import logged_problems, logged_tracebacks
from tests.support.s3_server import S3Server

_LIMIT_SECONDS = 120
_BUCKET = "kv-of-a-server-that-is-killed"


class Killer:
    """Kills a server as soon as it has answered a request of a kind, while others are on their way.

    Args:
        log: the server's.
    """

    def __init__(self, server: S3Server, log: Path) -> None:
        self._server = server
        self._log = log
        self._killed = threading.Event()

    def arm(self, request: str) -> None:
        """Kill at the next answered request that the pattern is found in."""
        self._killed.clear()
        begun = self._log.stat().st_size
        threading.Thread(target=self._watch, args=(re.compile(request.encode()), begun), daemon=True).start()

    def check(self) -> None:
        """Wait until it has killed; a store may come after its request has ended."""
        assert self._killed.wait(_LIMIT_SECONDS / 2), "no such request came"

    def _watch(self, request: re.Pattern[bytes], begun: int) -> None:
        pause = threading.Event()
        with self._log.open("rb") as log:
            log.seek(begun)
            for _ in range(_LIMIT_SECONDS * 500):
                if request.search(log.read()):
                    self._server.kill()
                    self._killed.set()
                    return
                pause.wait(0.002)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def server(log: Path) -> Iterator[S3Server]:
    server = S3Server(log)
    yield server
    server.kill()


@pytest.mark.parametrize("lab", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_object_store_is_killed_in_the_middle_and_comes_back(lab: Lab, server: S3Server, log: Path) -> None:
    killer = Killer(server, log)

    def start() -> None:
        killer.check()
        server.start()
        server.make_bucket(_BUCKET)
        settle()

    def kill_at_a_store() -> None:
        bucket = server.client()
        for found in bucket.list_objects_v2(Bucket=_BUCKET).get("Contents", []):
            bucket.delete_object(Bucket=_BUCKET, Key=found["Key"])
        killer.arm(r'"PUT [^"]*\.kv')

    server.make_bucket(_BUCKET)
    tier: dict[str, Any] = {
        "name": "bucket", "type": "nfs", "url": f"s3://{_BUCKET}/kv", "retry_seconds": 0.2, "lookup_cache_seconds": 0,
        "storage_options": {"endpoint_url": server.url},
    }  # fmt: skip
    run = PhasedRun(
        lab,
        lab.prompts(700, 1283, family=110),
        [
            Phase("first", served=False),
            Phase("well", served=True),
            Phase("killed in a load", lambda: killer.arm(r'"GET [^"]*\.kv')),
            Phase("gone", killer.check, served=False),
            Phase("back", start),
            Phase("stored again"),
            Phase("well again", served=True),
            Phase("killed in a store", kill_at_a_store, served=False),
            Phase("gone again", killer.check, served=False),
            Phase("back again", start),
            Phase("stored once more"),
            Phase("well after all", served=True),
        ],
    )
    # S3 on a busy machine is slow: the deadlines are for what is gone, which is told at once here.
    result = run.run(transfer(tier, lookup_timeout_seconds=10, load_timeout_seconds=10))
    lost = sum(count(result, f"load_{how}", "bucket") for how in ("failures", "timeouts", "missing"))
    assert lost > 0, "the first kill came in the middle of a load"
    assert count(result, "store_failures", "bucket") > 0, "and the second in the middle of a store"
    assert count(result, "load_corrupt", "bucket") == 0
    said = logged_problems(run.lines)
    assert 0 < len(said) <= 16, said
    assert logged_tracebacks(run.lines) == []
    assert result.shutdown_seconds < 10
