"""The listing of a bucket with many foreign keys: short pages, and jumps over names that no object can have."""

from __future__ import annotations

import hashlib
import logging
import re
import string
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.storage import s3
from offload_backend_nfs.storage.layout import FOLDERS, last_impossible_name, name_of

from tests.backends.nfs.calls import listed, run
from tests.backends.nfs.conftest import Nfs, key
from tests.support.s3_server import S3Server

OBJECTS = [key(number) for number in (0, 1, 255, 256, 300)]
FOLDER = "ab" * 32


def fill(server: S3Server, names: list[str]) -> str:
    bucket, client = server.make_bucket(), server.client()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: client.put_object(Bucket=bucket, Key=f"kv/{name}", Body=b"x"), names))
    return bucket


def pages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the listing requests that s3fs has logged."""
    return [one.getMessage() for one in caplog.records if "list_objects_v2" in one.getMessage()]


def list_bucket(nfs: Nfs, server: S3Server, bucket: str) -> list[Any]:
    async def work(backend: NfsBackend) -> list[Any]:
        return [found.key for found in await listed(backend)]

    url, options = f"s3://{bucket}/kv", {"endpoint_url": server.url}
    return run(nfs(url=url, storage_options=options), work)


def test_foreign_keys_are_jumped_over(
    nfs: Nfs, s3_server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PAGE_KEYS", 20)
    foreign = [f"{start}{number:03}" for start in ("#", "foreign", f"{FOLDER}x", "zz", "é") for number in range(60)]
    foreign += [f"foreign-folder/{number:03}" for number in range(60)]
    foreign += [f"{FOLDER}/Other{number:03}" for number in range(60)]
    foreign += [f"{FOLDER}/full-u256/01/temporary{number:03}" for number in range(60)]
    bucket = fill(s3_server, [*map(name_of, OBJECTS), *foreign])
    caplog.set_level(logging.DEBUG, "s3fs")
    assert set(list_bucket(nfs, s3_server, bucket)) == set(OBJECTS)
    requests = pages(caplog)
    assert not [one for one in requests if "foreign-folder/" in one.partition("StartAfter")[0]]
    folders = 2 + len({name_of(one).rpartition("/")[0] for one in OBJECTS})
    assert len(requests) <= 2 * folders + 4, requests


def test_among_foreign_keys_that_look_like_namespaces_the_pages_grow(
    nfs: Nfs, s3_server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a store that names them by their digest cannot be jumped over: each may come before a namespace."""
    monkeypatch.setattr(s3, "_PAGE_KEYS", 10)
    monkeypatch.setattr(s3, "_MAX_PAGE_KEYS", 100)
    foreign = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(600)]
    bucket = fill(s3_server, [*map(name_of, OBJECTS), *foreign])
    caplog.set_level(logging.DEBUG, "s3fs")
    assert set(list_bucket(nfs, s3_server, bucket)) == set(OBJECTS)
    requests = [one for one in pages(caplog) if f"{FOLDER}/" not in one.partition("StartAfter")[0]]
    assert 600 / 100 < len(requests) <= 600 / 100 + 10, requests


def test_pages_are_short_and_complete(
    nfs: Nfs, s3_server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3._PAGE_KEYS <= 200
    monkeypatch.setattr(s3, "_PAGE_KEYS", 7)
    many = [key(number, pack) for number in range(30) for pack in ("full-u256", "state")]
    bucket = fill(s3_server, [name_of(one) for one in many])
    caplog.set_level(logging.DEBUG, "s3fs")
    found = list_bucket(nfs, s3_server, bucket)
    assert len(found) == len(many)
    assert set(found) == set(many)
    assert all(re.search(r"'MaxKeys': 7\b", one) for one in pages(caplog))


def test_a_listing_tells_its_progress_per_page(nfs: Nfs, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PAGE_KEYS", 7)
    bucket = fill(s3_server, [f"records/{number:02}" for number in range(30)])
    told: list[None] = []

    async def work(backend: NfsBackend) -> int:
        return len(await backend.run_blocking(backend.medium.entries, "records", lambda: told.append(None)))

    assert run(nfs(url=f"s3://{bucket}/kv", storage_options={"endpoint_url": s3_server.url}), work) == 30
    assert len(told) == 5


NAMES = st.text(st.sampled_from("/.-_#09afgkvz~é" + string.ascii_uppercase[:2]), max_size=4)
VALID = [
    ("", st.sampled_from(["0" * 64, "9" * 64, "a" * 64, FOLDER, "f" * 64]).map(lambda name: name + "/")),
    (FOLDER, st.from_regex(r"[a-z0-9-]{1,5}", fullmatch=True).map(lambda name: name + "/")),
    (f"{FOLDER}/state", st.from_regex(r"[0-9a-f]{2}", fullmatch=True).map(lambda name: name + "/")),
    (f"{FOLDER}/state/ab", st.from_regex(r"ab([0-9a-f]{2}){0,3}\.kv", fullmatch=True)),
]


@given(data=st.data(), depth=st.integers(0, len(FOLDERS)))
def test_no_name_of_the_layout_is_jumped_over(data: st.DataObject, depth: int) -> None:
    folder, names = VALID[depth]
    good = data.draw(names)
    name = data.draw(NAMES) if data.draw(st.booleans()) else good[: data.draw(st.integers(0, 65))] + data.draw(NAMES)
    jump = last_impossible_name(folder, name)
    if good > name:
        assert jump is not None
        assert name <= jump < good
    else:
        assert jump is None or jump >= name


def test_other_folders_are_listed_whole() -> None:
    for folder in (".temporary", "records", f"{FOLDER}/UPPER", f"{FOLDER}/state/ab/more"):
        assert last_impossible_name(folder, "zebra") == "zebra"
