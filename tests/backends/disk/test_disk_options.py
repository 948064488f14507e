"""The checks of the disk backend's options, as the operator sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
from offload_backend_disk import DiskOptions

from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config


def options(path: object) -> DiskOptions:
    config = load_config({"backends": [{"name": "nvme", "type": "disk", "path": path}]})
    given = config.tiers[0].options
    assert isinstance(given, DiskOptions)
    return given


def problem(path: object) -> str:
    with pytest.raises(ConfigError) as caught:
        options(path)
    (only,) = caught.value.problems
    return only


def test_a_folder_that_exists_or_has_a_parent_is_accepted(tmp_path: Path) -> None:
    assert options(str(tmp_path)).path == tmp_path
    assert options(str(tmp_path / "new")).path == tmp_path / "new"
    assert not (tmp_path / "new").exists(), "validation creates nothing"


def test_a_relative_path_and_the_home_folder_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert options("./kv-cache").path == tmp_path / "kv-cache"
    assert options("~/kv-cache").path == tmp_path / "kv-cache"


def test_a_missing_parent_is_named_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "kv"
    assert problem(str(path)) == (
        f"backends.0.path: {str(path)!r} is not valid: the parent folder {path.parent} does not exist; "
        "create it, or mount the disk that should be there"
    )


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert problem(str(path)).endswith(f"{path} is a file; name a folder")


def test_a_wrong_type_is_refused() -> None:
    assert problem(5).startswith("backends.0.path: 5 is not valid: Input is not a valid path")


@pytest.mark.parametrize(
    ("path", "reason"),
    [("~no-such-user/kv", "home directory"), ("/tmp/" + "x" * 300, "File name too long")],
    ids=["unknown user", "too long"],
)
def test_a_path_that_cannot_be_examined_is_reported_like_any_problem(path: str, reason: str) -> None:
    found = problem(path)
    assert found.startswith(f"backends.0.path: {path!r} is not valid: ")
    assert reason in found


@pytest.mark.parametrize("path", ["", " ", "/", "//", "/tmp/.."])
def test_no_folder_and_the_root_are_refused(path: str) -> None:
    found = problem(path)
    assert found.startswith(f"backends.0.path: {path!r} is not valid: ")
    assert "name a folder" in found


def test_watermarks_in_the_wrong_order_are_refused_with_the_cure(tmp_path: Path) -> None:
    for given, low in (({"low_watermark": 0.9, "high_watermark": 0.8}, 0.9), ({"high_watermark": 0.8}, 0.95)):
        tier = {"name": "nvme", "type": "disk", "path": str(tmp_path), "capacity": "1GiB", **given}
        with pytest.raises(ConfigError) as caught:
            load_config({"backends": [tier]})
        (only,) = caught.value.problems
        assert only.startswith("backends.0.low_watermark: ")
        assert f"low_watermark ({low}) is above high_watermark (0.8)" in only
        assert only.endswith("give a low_watermark of at most 0.8")


@pytest.mark.parametrize("given", [{"eviction": "fifo"}, {"keep_free": "1,5GiB"}, {"high_watermark": 0}], ids=str)
def test_an_invalid_option_is_refused(tmp_path: Path, given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"backends\.0\.{next(iter(given))}: "):
        load_config({"backends": [{"name": "nvme", "type": "disk", "path": str(tmp_path), **given}]})
