"""Geometry files: a round trip, and every problem in one error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import ConfigError
from offload_core.config.geometry_file import KVCacheGeometry, load_geometry, save_geometry
from tests.support.geometries import FULL, STATE, Geometry, chunked, geometries, window

FULL_GROUP: dict[str, Any] = {"block_size_tokens": 16, "policy": "full", "pages": [{"count": 2, "page_bytes": 64}]}


def geometry(*groups: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"hash_block_size_tokens": 16, "groups": list(groups or [FULL_GROUP]), **keys}


def problems(tmp_path: Path, keys: object) -> list[str]:
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps(keys))
    with pytest.raises(ConfigError) as caught:
        load_geometry(path)
    assert str(path) in str(caught.value)
    return list(caught.value.problems)


def saved(model: Geometry, page_bytes: int = 64) -> KVCacheGeometry:
    """A model's geometry with one layer of ``page_bytes`` times its group's index plus one in each group."""
    groups = [
        {
            "block_size_tokens": group.block_size_tokens,
            "policy": group.policy,
            "pages": [{"count": 1, "page_bytes": page_bytes * (group.index + 1)}],
        }
        for group in model.groups
    ]
    return KVCacheGeometry.model_validate({"hash_block_size_tokens": model.hash_block_size, "groups": groups})


@given(model=geometries())
def test_a_saved_geometry_makes_the_same_plan(tmp_path_factory: pytest.TempPathFactory, model: Geometry) -> None:
    path = tmp_path_factory.getbasetemp() / "geometry.yaml"
    save_geometry(saved(model), path)
    read = load_geometry(path)
    assert read == saved(model)
    assert read.planner(model.hybrid_chunk_size) == model.plan()
    assert [item.name for item in path.parent.glob("*geometry.yaml*")] == [path.name]


@pytest.mark.parametrize(
    ("written", "policy"),
    [("full", FULL), ("state", STATE), ("window 1024", window(1024)), ("chunked 8192", chunked(8192))],
)
def test_policies_are_read_as_they_are_written(tmp_path: Path, written: str, policy: object) -> None:
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps(geometry({**FULL_GROUP, "policy": written})))
    read = load_geometry(path)
    assert read.groups[0].policy == policy
    save_geometry(read, path)
    assert json.loads(path.read_text())["groups"][0]["policy"] == written


@pytest.mark.parametrize("policy", ["windows 16", "window", "window 0", "window 16 ", "full 3", 7, None, ["full"]])
def test_an_unknown_policy_is_refused_with_those_that_there_are(tmp_path: Path, policy: object) -> None:
    (problem,) = problems(tmp_path, geometry({**FULL_GROUP, "policy": policy}))
    shown = "a list" if isinstance(policy, list) else repr(policy)
    assert problem.startswith(f"groups.0.policy: {shown} is not valid: write full, state, window N or chunked N")


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    pages = {"count": 0, "page_bytes": "64", "bytes": 1}
    bad = {"block_size": 16, "block_size_tokens": 0, "policy": "fll", "pages": [pages]}
    found = problems(tmp_path, geometry(FULL_GROUP, bad, {}, max_model_length=5, ranks=True))
    assert [problem.split(":")[0] for problem in found] == [
        "ranks",
        "groups.1.block_size_tokens",
        "groups.1.policy",
        "groups.1.pages.0.count",
        "groups.1.pages.0.page_bytes",
        "groups.1.pages.0.bytes",
        "groups.1.block_size",
        "groups.2.block_size_tokens",
        "groups.2.policy",
        "groups.2.pages",
        "max_model_length",
    ]
    assert found[1].startswith("groups.1.block_size_tokens: 0 is not valid")
    assert "(did you mean 'page_bytes'?); valid keys: count, page_bytes" in found[5]
    assert "(did you mean 'block_size_tokens'?); valid keys: block_size_tokens, index, name" in found[6]
    assert "(did you mean 'max_model_len'?); valid keys: groups, hash_block" in found[-1]


def test_a_geometry_without_groups_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, {"hash_block_size_tokens": 16}) == ["groups: missing; add it"]
    (problem,) = problems(tmp_path, {"hash_block_size_tokens": 16, "groups": []})
    assert problem.startswith("groups: a list is not valid: List should have at least 1 item")


def test_two_groups_with_one_index_are_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, geometry(FULL_GROUP, {**FULL_GROUP, "index": 0}, FULL_GROUP))
    assert [problem.split(";")[0] for problem in found] == [
        "groups.0.index: 0 is used by 2 groups",
        "groups.1.index: 0 is used by 2 groups",
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("absent.json", None, "does not exist"),
        ("geometry.txt", "", "must end in .yaml, .yml, .json, .toml"),
        ("geometry.json", "{", "cannot be read as json"),
        ("geometry.yaml", "- 1", "holds a list; it must hold keys and values"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, name: str, content: str | None, problem: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_geometry(path)
    (found,) = caught.value.problems
    assert found.startswith(f"geometry: {str(path)!r} ")
    assert problem in found
    assert caught.value.source == f"{path} (geometry)"


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "geometry.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"geometry\.json"):
        save_geometry(KVCacheGeometry.model_validate(geometry()), path)
    assert list(tmp_path.iterdir()) == [path]


def test_every_key_is_described() -> None:
    schema = KVCacheGeometry.model_json_schema()
    for model in (schema, *schema["$defs"].values()):
        assert [name for name, key in model["properties"].items() if "description" not in key] == []


@given(tokens=st.integers(1, 1 << 40))
def test_the_schema_accepts_what_the_model_writes(tokens: int) -> None:
    pattern = KVCacheGeometry.model_json_schema()["$defs"]["KVCacheGroup"]["properties"]["policy"]["pattern"]
    read = KVCacheGeometry.model_validate(geometry({**FULL_GROUP, "policy": f"window {tokens}"}))
    assert re.search(pattern, json.loads(read.model_dump_json())["groups"][0]["policy"])
