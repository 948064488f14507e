"""Damaged, missing and unwritable storage: the same output every time, the right counts, and healing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload_core.objects.format import HEADER_BYTES
from tests.support.engine.lab import UNTIL_STORED, Lab, count, installed, objects, ours, served
from tests.support.engine.spec import Round, compare


@pytest.fixture
def kv(stored: Path, tmp_path: Path) -> Path:
    """A copy of that folder to spoil."""
    return Path(shutil.copytree(stored, tmp_path / "kv"))


def _flip_a_byte(path: Path, index: int) -> None:
    """In the header of every second object and in the payload of the others."""
    content = bytearray(path.read_bytes())
    offset = 100 if index % 2 else HEADER_BYTES + (len(content) - HEADER_BYTES) // 2
    content[offset] ^= 0x40
    path.write_bytes(content)


def _cut_in_half(path: Path, index: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.every_version
def test_every_object_damaged(lab: Lab, kv: Path) -> None:
    _all_damaged(lab, kv, _flip_a_byte)


@pytest.mark.parametrize("lab", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_every_object_cut_in_half(lab: Lab, kv: Path) -> None:
    _all_damaged(lab, kv, _cut_in_half)


def _all_damaged(lab: Lab, kv: Path, damage: Callable[[Path, int], None]) -> None:
    damaged = objects(kv)
    before = {path: path.read_bytes() for path in damaged}
    for index, path in enumerate(damaged):
        damage(path, index)

    result = lab.run(lab.standard(), ours(kv))

    assert compare(lab.alone(lab.standard()), result) == []
    assert not any(served(result).values()), "nothing that is left can be whole"
    assert count(result, "load_corrupt") > 0
    assert count(result, "load_hits") == count(result, "load_missing") == count(result, "load_failures") == 0
    assert count(result, "recomputed_requests", "all") == 3
    mended = [path for path in damaged if path.exists() and path.read_bytes() == before[path]]
    assert count(result, "load_corrupt") <= len(mended), "every damaged object that was loaded is stored again"

    healed = lab.run(lab.standard(), ours(kv))
    assert compare(lab.alone(lab.standard()), healed) == []
    assert all(served(healed).values())


@pytest.mark.parametrize("lab", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_folder_emptied_between_lookup_and_load(lab: Lab, kv: Path, tmp_path: Path) -> None:
    transfer = ours(kv)
    transfer["kv_connector_extra_config"]["backends"][0]["type"] = "vanishing-disk"
    (first,) = lab.standard()
    second = first.model_copy(update={"name": "second", "reset_prefix_cache_before": True})

    result = lab.run([first, second], transfer, env=installed(tmp_path, "vanishing_disk"))

    assert compare(lab.alone([first, second]), result) == []
    assert count(result, "load_missing") > 0
    assert count(result, "load_corrupt") == count(result, "load_failures") == 0
    assert count(result, "recomputed_requests", "all") == 1, "the first prompt; then the lookups know"
    assert not any(served(result, 0).values())
    assert all(served(result, 1).values()), "what is gone is stored again by the process that knew it"


def test_folder_emptied_while_the_engine_knows_what_was_in_it(gemma3: Lab, tmp_path: Path) -> None:
    transfer = ours(tmp_path / "kv")
    transfer["kv_connector_extra_config"]["backends"][0]["type"] = "vanishing-disk"
    (first,) = gemma3.standard()
    rounds = [first] + [
        first.model_copy(update={"name": name, "reset_prefix_cache_before": True}) for name in ("gone", "stored again")
    ]

    result = gemma3.run(rounds, transfer, env=installed(tmp_path, "vanishing_disk"), extra_engine_args=UNTIL_STORED)

    assert compare(gemma3.alone(rounds), result) == []
    assert not any(served(result, 1).values())
    assert all(served(result, 2).values())


@pytest.mark.parametrize("lab", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_read_only_mount(lab: Lab, kv: Path, read_only: Callable[[Path], None]) -> None:
    rounds = [Round(name="prompts", prompts=[*lab.standard()[0].prompts, *lab.prompts(900, family=31)])]
    _flip_a_byte(objects(kv)[0], 0)
    there = {path: path.read_bytes() for path in objects(kv)}
    read_only(kv)

    result = lab.run(rounds, ours(kv))

    assert compare(lab.reference(rounds), result) == []
    assert sum(served(result).values()) > 0, "what is there can still be loaded"
    assert count(result, "stores") == 0
    assert count(result, "store_failures") > 0
    assert count(result, "delete_failures") == count(result, "load_corrupt")
    assert {path: path.read_bytes() for path in objects(kv)} == there


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """A function that makes a folder a read-only mount, as an operator would, until the test ends."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        steps = (["mount", "--bind", str(folder), str(folder)], ["mount", "-o", "remount,bind,ro", str(folder)])
        for command in steps:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")
            mounted.append(folder)

    yield mount
    if mounted:
        subprocess.run(["umount", str(mounted[0])], check=True)
