"""Files are read once per host, and a digest from an earlier start is used only if it must be right."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.objects import file_digests, kept_digests
from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import files_identity
from tests.backends.disk.conftest import mount
from tests.core.objects.digests import CACHE, MIB, identity, write
from tests.support.polling import wait_until
from tests.support.process_state import bytes_read
from tests.support.random_examples import examples


def test_a_model_that_was_seen_before_is_not_read(tmp_path: Path, cache: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for number in range(4):
        with (model / f"model-{number}.safetensors").open("wb") as file:
            file.write(os.urandom(16))
            file.truncate(128 * MIB)
    found: list[str] = []

    def start() -> None:
        found.append(identity(model, cache))

    assert bytes_read(start) > 512 * MIB
    assert bytes_read(start) < MIB
    assert found[0] == found[1] == identity(model, None)


def test_engines_of_a_host_share_the_digests(model: Path, cache: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from offload_core.objects.file_digests import FileDigests\n"
        "from offload_core.objects.fingerprint import files_identity, fingerprint\n"
        "print(fingerprint(files_identity(Path(sys.argv[1]), FileDigests(Path(sys.argv[2]), 0))))"
    )
    command = [sys.executable, "-c", script, str(model), str(cache)]
    engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert {engine.communicate(timeout=60)[0] for engine in engines} == {identity(model, None) + "\n"}
    assert [path.name for path in cache.iterdir()] == [CACHE]
    assert len(json.loads((cache / CACHE).read_text().split("\n")[1])["digests"]) == 2


def test_engines_keep_the_digests_of_each_other(tmp_path: Path, cache: Path) -> None:
    models = [tmp_path / name for name in ("a", "b")]
    for folder in models:
        folder.mkdir()
        write(folder / "weights.bin", folder.name.encode() * MIB)
    first, second = FileDigests(cache, 0.0), FileDigests(cache, 0.0)
    files_identity(models[0], first)
    files_identity(models[1], second)
    files_identity(models[0], first)
    assert bytes_read(lambda: [identity(folder, cache) for folder in models]) < MIB


def _kept_digests(cache: Path) -> int:
    kept = cache / CACHE
    return len(json.loads(kept.read_text().split("\n")[1])["digests"]) if kept.exists() else 0


def test_a_start_after_a_killed_one_reads_only_the_rest(model: Path, cache: Path) -> None:
    write(model / "weights.bin", bytes(4 * MIB))
    with (model / "endless.bin").open("wb") as file:
        file.truncate(1 << 40)
    script = (
        "import sys; from pathlib import Path; from offload_core.objects.file_digests import FileDigests\n"
        "FileDigests(Path(sys.argv[1]), 0.0, progress_seconds=0.05).of([Path(name) for name in sys.argv[2:]])"
    )
    names = [str(path) for path in model.iterdir()]
    with subprocess.Popen([sys.executable, "-c", script, str(cache), *names]) as killed:
        wait_until(lambda: _kept_digests(cache) == 2, "the digests of the short files were not kept")
        killed.kill()
    (model / "endless.bin").unlink()
    assert bytes_read(lambda: identity(model, cache)) < MIB


def test_a_changed_byte_is_seen_though_the_modification_time_is_restored(model: Path, cache: Path) -> None:
    weights = model / "weights.bin"
    before, times = identity(model, cache), weights.stat()
    write(weights, b"WEIGHTS")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_mtime_ns == times.st_mtime_ns
    assert identity(model, cache) == identity(model, None) != before


def test_a_file_that_takes_the_place_of_another_is_read(model: Path, cache: Path) -> None:
    before, times = identity(model, cache), (model / "weights.bin").stat()
    write(model / "other.bin", b"WEIGHTS")
    os.utime(model / "other.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    (model / "other.bin").rename(model / "weights.bin")
    assert identity(model, cache) == identity(model, None) != before


@pytest.fixture
def coarse_clock() -> Iterator[Path]:
    """A file system that does not tell two changes within a tick apart, as other kernels' file systems."""
    folder = Path(tempfile.mkdtemp(prefix="offload-coarse-clock-"))  # a mount in tmp_path could outlive a killed run
    try:
        mount("-t", "ramfs", "ramfs", folder)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        folder.rmdir()


def test_a_change_within_a_tick_of_the_clock_is_seen(
    coarse_clock: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a file that has just changed is not kept: its times may stay the same with the next change."""
    monkeypatch.setattr(file_digests, "_READ_BYTES", 4096)  # a large buffer takes longer than a tick to make
    weights = coarse_clock / "weights.bin"
    same_tick = 0
    for number in range(100):
        weights.write_bytes(b"%07d" % number)
        times = weights.stat()
        identity(coarse_clock, cache, settled_seconds=60)
        weights.write_bytes(b"%07d" % (number + 1))
        same_tick += weights.stat().st_ctime_ns == times.st_ctime_ns
        assert identity(coarse_clock, cache, settled_seconds=60) == identity(coarse_clock, None)
    assert same_tick


def test_the_default_waits_until_times_are_certain(model: Path, cache: Path) -> None:
    files_identity(model, FileDigests(cache))
    assert not cache.exists()


def test_times_in_whole_seconds_are_not_trusted() -> None:
    """They come from clocks that tick once a second, and from images that have the same times in every build."""
    day = 86400 * 1_000_000_000
    settled = kept_digests.FileState("1:2:3:4:5", 1_000_000_000).settled
    assert not settled(day, 60)
    assert kept_digests.FileState("1:2:3:4:5", 1_000_000_001).settled(day, 60)


tree_edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip, times restored", "append", "remove", "rename", "swap", "add", "link", "start"]),
        st.integers(0, 2**32),
    ),
    max_size=12,
)


@given(edits=tree_edits, seed=st.integers(0, 2**32))
@examples(400)
def test_random_edits_are_seen_with_a_warm_cache_and_without(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int]], seed: int
) -> None:
    """The oracle reads everything afresh, with another hash and another walk."""
    root = tmp_path_factory.mktemp("tree")
    model, cache = root / "model", root / "cache"
    chance = random.Random(seed)
    folders = [model, model / "a", model / "a/b", model / "c"]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(chance.randrange(1, 7)):
        write(chance.choice(folders) / f"file{number}.{chance.choice(['bin', 'py', 'x'])}", chance.randbytes(20))
    seen: dict[str, dict[str, bytes]] = {}
    for kind, draw in [("start", 0), *edits, ("start", 0)]:
        _edit(model, kind, random.Random(draw), root)
        content = {
            os.path.relpath(Path(place, name), model): Path(place, name).read_bytes()
            for place, _, names in os.walk(model, followlinks=True)
            for name in names
        }
        if kind == "start":
            warm, cold = identity(model, cache), identity(model, None)
            assert warm == cold
            assert seen.setdefault(warm, content) == content
    assert len({json.dumps({k: v.hex() for k, v in one.items()}, sort_keys=True) for one in seen.values()}) == len(seen)


def _edit(model: Path, kind: str, chance: random.Random, outside: Path) -> None:
    files = sorted(path for path in model.rglob("*") if path.is_file())
    if kind == "add":
        write(chance.choice([model, model / "a", model / "c"]) / f"new{chance.randrange(9)}.bin", b"new")
    if not files or kind in ("add", "start"):
        return
    path = chance.choice(files)
    data, times = bytearray(path.read_bytes()), path.stat()
    if kind.startswith("flip") and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        write(path, bytes(data))
        if kind != "flip":
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif kind == "append":
        write(path, bytes(data) + b"x")
    elif kind == "remove":
        path.unlink()
    elif kind == "rename":
        path.rename(path.with_name(f"renamed{chance.randrange(9)}.bin"))
    elif kind == "swap":
        other = chance.choice(files)
        temporary = outside / "swapped"
        path.rename(temporary)
        if other != path:
            other.rename(path)
        temporary.rename(other)
    elif kind == "link":
        blob = outside / f"blob{len(list(outside.iterdir()))}"
        path.rename(blob)
        path.symlink_to(blob)


def test_several_threads_read(tmp_path: Path) -> None:
    """Readers that start on one file are not held up by another one's."""
    names = [threading.current_thread().name]
    for number in range(3):
        write(tmp_path / f"{number}.bin", b"content")
    barrier = threading.Barrier(3, timeout=30)
    found = xxhash.xxh3_128

    def waits_for_others() -> object:
        names.append(threading.current_thread().name)
        barrier.wait()
        return found()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload_core.objects.file_digests.xxhash.xxh3_128", waits_for_others)
        identity(tmp_path, None)
    assert len(set(names)) == 4


def test_the_progress_of_a_large_model_is_shown(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(600_000_000)
    reader = FileDigests(cache, 0.0, progress_bytes=600_000_000, progress_seconds=0.01)
    with caplog.at_level(logging.INFO):
        reader.of([tmp_path / "weights.bin"])
        lines = [record.getMessage() for record in caplog.records]
        reader.of([tmp_path / "weights.bin"])
    assert lines[0] == "reading model files for the cache's identity: 0 of 1 GB"
    assert re.fullmatch(r"reading model files for the cache's identity: [01] of 1 GB, \d+ s left", lines[-1])
    assert len(lines) == len(caplog.records), "a model that was seen before is not announced"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "weights.bin", b"content")
    script = (
        "import os, sys; from pathlib import Path; from offload_core.objects.file_digests import FileDigests\n"
        "os.chdir(sys.argv[1]); os.chmod('weights.bin', 0); os.chmod('.', 0o711)\n"
        "os.setuid(os.getuid() or 65534)\n"
        "FileDigests(None).of([Path('weights.bin')])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "PermissionError: [Errno 13] Permission denied: 'weights.bin'" in ended.stderr


def test_a_file_that_keeps_changing_is_an_error(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    with weights.open("wb") as file:
        file.truncate(256 * MIB)
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            os.utime(weights)
            time.sleep(0.001)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with pytest.raises(OSError, match=r"weights\.bin changes while it is read"):
            identity(tmp_path, None)
    finally:
        ended.set()
        thread.join()
