"""A model is identified by all files that can decide the bytes of its KV cache (I7)."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import Json, files_identity
from offload_core.objects.model_files import model_files

COUNTING = [
    "config.json",
    "model.safetensors",
    "modeling_custom.py",
    "weights.npz",
    "weights.ckpt",
    "weights.msgpack",
    "weights.h5",
    "weights.unknown",
    "weights",
    "tokenizer.json",
    "preprocessor_config.json",
    "sub/model.safetensors",
    "sub/deeper/code.py",
    ".hidden",
]
HARMLESS = [
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "figure.PNG",
    "vllm.log",
    "chat_template.jinja",
    "generation_config.json",
    ".gitattributes",
    ".git/objects/pack",
    "sub/.git/HEAD",
    ".cache/huggingface/download/config.json.metadata",
    "__pycache__/modeling_custom.cpython-311.pyc",
    "kv/.offload-core/account.sqlite",
    "kv/aa/object.kv",
    "share/.offload-core-share",
    "share/aa/object.kv",
]


def identity(folder: Path) -> dict[str, Json]:
    return files_identity(folder, FileDigests(None))


def write(path: Path, content: bytes = b"content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name in (*COUNTING, *HARMLESS):
        write(folder / name, name.encode())
    return folder


def test_all_files_count_but_a_few_harmless_ones(model: Path) -> None:
    assert sorted(identity(model)) == sorted(COUNTING)


@pytest.mark.parametrize("name", COUNTING)
def test_a_changed_byte_of_the_same_size_is_another_model(model: Path, name: str) -> None:
    before = identity(model)
    data = bytearray((model / name).read_bytes())
    data[-1] ^= 1
    (model / name).write_bytes(data)
    assert identity(model) != before


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_file_may_change(model: Path, name: str) -> None:
    before = identity(model)
    write(model / name, b"changed")
    assert identity(model) == before


@pytest.mark.parametrize("change", ["another file", "an empty file", "a missing file", "another name"])
def test_other_names_of_files_are_another_model(model: Path, change: str) -> None:
    before = identity(model)
    if change in ("another file", "an empty file"):
        write(model / "sub/another.safetensors", b"" if change == "an empty file" else b"another")
    elif change == "a missing file":
        (model / "sub/model.safetensors").unlink()
    else:
        (model / "sub/model.safetensors").rename(model / "sub/model-2.safetensors")
    assert identity(model) != before


def test_a_copy_elsewhere_is_the_same_model(model: Path, tmp_path: Path) -> None:
    assert identity(model) == identity(Path(shutil.copytree(model, tmp_path / "copy")))


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A folder of links as the hub's client makes it."""
    repository = tmp_path / "models--a--b"
    write(repository / "blobs/0123abcd", b"weights")
    write(repository / "blobs/4567cdef", b"code")
    (repository / "snapshots/commit/sub").mkdir(parents=True)
    (repository / "snapshots/commit/model.safetensors").symlink_to("../../blobs/0123abcd")
    (repository / "snapshots/commit/sub/code.py").symlink_to("../../../blobs/4567cdef")
    return repository / "snapshots/commit"


@pytest.mark.parametrize("name", ["model.safetensors", "sub/code.py"])
def test_a_blob_that_is_edited_in_place_is_another_model(snapshot: Path, name: str) -> None:
    before = identity(snapshot)
    blob = (snapshot / name).resolve()
    blob.write_bytes(blob.read_bytes().upper())
    assert identity(snapshot).keys() == before.keys()
    assert identity(snapshot) != before


def test_a_snapshot_of_links_is_the_same_model_as_a_folder_of_files(snapshot: Path, tmp_path: Path) -> None:
    assert identity(snapshot) == identity(Path(shutil.copytree(snapshot, tmp_path / "copy")))


def test_links_to_folders_are_followed(model: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside/adapter/weights.bin").parent.parent
    (model / "linked").symlink_to(outside)
    before = identity(model)
    assert "linked/adapter/weights.bin" in before
    write(outside / "adapter/weights.bin", b"CONTENT")
    assert identity(model) != before


def test_links_that_form_loops_end(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write(model / "a/weights.bin")
    (model / "a/up").symlink_to("..")
    (model / "a/self").symlink_to("self")
    (model / "b").symlink_to("a")
    assert identity(model) == {
        "a/self": "dead link: ELOOP",
        "a/up": "folder: ",
        "a/weights.bin": identity(model / "a")["weights.bin"],
        "b": "folder: a",
    }


def test_many_links_to_the_same_folders_are_not_followed_again_and_again(tmp_path: Path) -> None:
    for level in range(40):  # 2**40 paths
        (tmp_path / f"{level:02}").mkdir()
        for name in "ab":
            (tmp_path / f"{level:02}" / name).symlink_to(f"../{level + 1:02}")
    write(tmp_path / "40/weights.bin")
    assert [name for name, digest in identity(tmp_path).items() if str(digest).startswith("xxh3:")]


def test_a_dead_link_differs_from_no_link_and_from_a_live_one(tmp_path: Path) -> None:
    model = write(tmp_path / "model/config.json").parent
    without = identity(model)
    (model / "weights.bin").symlink_to(tmp_path / "blob")
    dead = identity(model)
    write(tmp_path / "blob")
    assert len({str(sorted(one.items())) for one in (without, dead, identity(model))}) == 3


def test_pipes_and_sockets_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "model/config.json").parent
    monkeypatch.chdir(model)  # the name of a socket must be short
    os.mkfifo("pipe.bin")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.bin")
    found = identity(model)
    assert found["pipe.bin"] != found["socket.bin"]
    assert {str(found[name]).split(":")[0] for name in ("pipe.bin", "socket.bin")} == {"no file"}


def test_a_file_that_becomes_a_pipe_meanwhile_is_an_error(tmp_path: Path) -> None:
    found = model_files(write(tmp_path / "model/weights.bin").parent).files
    (tmp_path / "model/weights.bin").unlink()
    os.mkfifo(tmp_path / "model/weights.bin")
    with pytest.raises(OSError, match=r"weights\.bin is no regular file"):
        FileDigests(None).of(found.values())


def test_names_that_are_not_text_are_read(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.bin")).write_bytes(b"content")
    assert list(identity(tmp_path)) == ["\udcff.bin"]
