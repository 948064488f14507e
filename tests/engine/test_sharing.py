"""Two engines share one storage while a third process evicts from it: nobody says anything else than alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.media import SMALL_BYTES, Storage
from tests.support.engine.lab import Lab, count, served
from tests.support.engine.spec import Round, RunResult, compare, logged_problems
from tests.support.paths import ROOT

pytestmark = pytest.mark.long

COMMAND = Path(sys.executable).with_name("offload-core")

Stores = Callable[[str], Storage]


def _rounds(lab: Lab) -> list[Round]:
    """The same prompts again and again, so that both engines want everything all the time."""
    prompts = [prompt for family in range(80, 84) for prompt in lab.prompts(700, 1283, 2500, family=family)]
    names = ("first", "second", "third", "fourth")
    return [Round(name=name, prompts=prompts, reset_prefix_cache_before=True) for name in names]


@contextmanager
def _evicting(storage: Storage) -> Iterator[list[int]]:
    """Another process that deletes objects at random; gives how many it has deleted, when the block has ended."""
    deleted: list[int] = []
    command = [sys.executable, "-m", "tests.engine.evictor", str(storage.config_file()), "7"]
    root, search_path = ROOT, [entry for entry in sys.path if entry]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *search_path])}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        yield deleted
        out, err = process.communicate(input="", timeout=60)
        assert (process.returncode, err) == (0, "")
        deleted.append(int(out.split()[-1]))
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def _pruning(storage: Storage) -> Iterator[list[int]]:
    """An operator who lets ``offload-core prune`` keep the storage small; gives how many objects have gone."""
    command = [str(COMMAND), "prune", str(storage.config_file()), "--max-bytes", "8MiB", "--yes", "--json"]
    ended = threading.Event()
    deleted = [0]

    def prune() -> None:
        while not ended.is_set():
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            deleted[0] += sum(tier["removed_objects"] for tier in json.loads(done.stdout)["tiers"])

    with ThreadPoolExecutor(1) as pool:
        pruned = pool.submit(prune)
        try:
            yield deleted
        finally:
            ended.set()
        pruned.result()


def _share(lab: Lab, storage: Storage, **keys: Any) -> tuple[RunResult, RunResult]:
    """Run an engine that only stores and, as soon as it has stored something, one that only loads."""
    rounds = _rounds(lab)
    stored_something = threading.Event()
    lines: dict[str, list[str]] = {"kv_producer": [], "kv_consumer": []}

    def run(role: str) -> RunResult:
        if role == "kv_consumer":
            assert stored_something.wait(120)
        return lab.run(
            rounds,
            {**storage.transfer(**keys), "kv_role": role},
            on_progress=lambda fields: stored_something.set(),
            on_line=lines[role].append,
        )

    with ThreadPoolExecutor(2) as pool:
        storing, loading = pool.map(run, lines)
    for result in (storing, loading):
        assert compare(lab.reference(rounds), result) == []
        for name in storage.names:
            for counter in ("load_failures", "store_failures", "delete_failures", "lookup_failures", "load_timeouts"):
                assert count(result, counter, name) == 0, (name, counter)
            assert count(result, "load_corrupt", name) == 0
    assert {role: logged_problems(said) for role, said in lines.items()} == {role: [] for role in lines}
    return storing, loading


@pytest.mark.parametrize(
    ("medium", "third"),
    [("nfs-file", _evicting), ("nfs-s3", _evicting), ("nfs-file", _pruning)],
    ids=["a share, evicted from at random", "a bucket, evicted from at random", "a share, pruned"],
)
def test_one_stores_one_loads_and_a_third_process_evicts(
    medium: str, third: Callable[[Storage], AbstractContextManager[list[int]]], lab: Lab, storage: Stores
) -> None:
    shared = storage(medium)
    with third(shared) as deleted:
        storing, loading = _share(lab, shared)
    assert deleted[0] > 0
    (tier,) = shared.names
    assert count(storing, "stores", tier) > len(list(shared.objects())), "what was evicted is stored again"
    assert count(storing, "load_hits", tier) == 0
    assert count(loading, "stores", tier) == 0
    assert sum(sum(served(loading, index).values()) for index in range(4)) > 0


def test_one_stores_and_one_loads_under_one_limit(gemma3: Lab, storage: Stores) -> None:
    shared = storage("nfs-file")
    shared.tiers[0] |= {"capacity": 3 * SMALL_BYTES, "eviction_grace": 1}
    storing, loading = _share(gemma3, shared)
    there = [len(found.read() or b"") for found in shared.objects()]
    assert sum(there) <= 3 * SMALL_BYTES
    assert count(storing, "stores", "shared") > len(there), "what was there has made room"
    assert count(loading, "stores", "shared") == 0
