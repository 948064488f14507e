"""Files made to exhaust the reader: each is refused soon, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload_core.api.errors import ConfigError
from offload_core.config.file import MAX_FILE_BYTES, read_keys
from offload_core.config.loading import load_config


def problems(tmp_path: Path, name: str, text: str | bytes) -> list[str]:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config({"config_file": str(path)})
    return list(caught.value.problems)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path / "sparse"):
        link = tmp_path / f"{path.name}.yaml"
        link.symlink_to(path)
        if not path.exists():
            path.touch()
            os.truncate(path, 1 << 40)
        with pytest.raises(ConfigError, match="it has more than 256 KiB; a configuration is much shorter"):
            read_keys(str(link))


@pytest.mark.timeout(60)
def test_many_keys_take_time_in_proportion_to_their_number(tmp_path: Path) -> None:
    many = ",".join(f'"k{number}":1' for number in range(20_000))
    began = time.process_time()
    (problem,) = problems(tmp_path, "c.json", f'{{"twice":1,"twice":2,{many}}}')
    assert problem.endswith("the key 'twice' is written twice; remove one")
    assert time.process_time() - began < 1  # a comparison of each key with all others takes 4 s


@pytest.mark.parametrize("name", ["c.json", "c.yaml"])
@pytest.mark.timeout(60)
def test_only_the_first_of_many_problems_are_listed(tmp_path: Path, name: str) -> None:
    twice = ", ".join(f'"k{number % 5000}": 1' for number in range(10_000))
    found = problems(tmp_path, name, f"{{{twice}}}")
    assert len(found) == 21
    assert found[-1].endswith(f"{name[2:]}: 4980 more keys have such problems")
    unknown = {f"k{number}": 1 for number in range(5_000)}
    found = problems(tmp_path, "c.json", json.dumps(unknown))
    assert "other keys: 4901 more problems" in found  # one is the missing list of tiers
    assert len(found) == 101
    found = problems(tmp_path, "c.json", json.dumps({"backends": [{"type": "x"}] * 5_000}))
    assert len(found) == 201
    assert found[-1].endswith("more problems")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.yaml", "staging_bytes: 0x" + "f" * 5000, "a number has thousands of digits"),
        ("c.toml", "staging_bytes = 0x" + "f" * 5000, "a number has thousands of digits"),
        ("c.yaml", "a: 1" + ":59" * 20_000, "a number has thousands of digits"),
        ("c.json", '{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("c.json", '{"a": "\\ud800"}', "half of a surrogate pair"),
        ("c.json", '{"\\ud800": 1}', "half of a surrogate pair"),
        ("c.yaml", 'a: "\\uD800"', "half of a surrogate pair"),
        ("c.json", '{"a": "x\\u0000"}', "NUL character"),
        ("c.yaml", 'a: ["\\0"]', "NUL character"),
        ("c.toml", 'a = "\\u0000"', "NUL character"),
        ("c.yaml", "a: 1".encode("utf-16"), "'utf-8' codec can't decode"),
        ("c.yaml", "a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("c.yaml", "a: 2001-12-14t21:59:43.10-99:99", "offset"),
        ("c.yaml", "a: !!int ''", "cannot be read as yaml"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_odd_value_is_refused_with_the_reason(tmp_path: Path, name: str, text: str | bytes, reason: str) -> None:
    (problem,) = problems(tmp_path, name, text)
    assert problem.startswith(f"config_file: '{tmp_path / name}' cannot be read as {name[2:]}: ")
    assert reason in problem


def test_a_long_value_is_shortened_in_messages(tmp_path: Path) -> None:
    for tier in ({"name": "n" * 50_000}, {"path": "/x" * 50_000}, {"k" * 50_000: 1}):
        keys = {"backends": [{"name": "a", "type": "disk", "path": str(tmp_path / "kv"), **tier}]}
        (problem,) = problems(tmp_path, "c.json", json.dumps(keys))
        assert len(problem) < 4000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["[],", "k: ", "*a,", "? ", "- ", "{", "'", "!!set ", "\\x41", "&a ", "|\n"])
def test_the_largest_file_is_read_or_refused_within_bounded_memory(tmp_path: Path, unit: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(("a: &a [" + unit * MAX_FILE_BYTES)[: MAX_FILE_BYTES - 1] + "]")
    script = f"""
import resource
from offload_core.api.errors import ConfigError
from offload_core.config.file import read_keys
before = resource.getrusage(resource.RUSAGE_SELF)
try:
    read_keys({str(path)!r})
except ConfigError:
    pass
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime - before.ru_utime, (after.ru_maxrss - before.ru_maxrss) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    seconds, mib = map(float, done.stdout.split())
    assert seconds < 20
    assert mib < 600
