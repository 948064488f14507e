"""The nfs backend on a real S3 server: requests, parts, and a server that dies, hangs and comes back."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError
from fsspec.asyn import get_loop, sync
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.storage.failures import ForeignFileError
from offload_backend_nfs.storage.s3 import S3Store
from s3fs.errors import translate_boto_error

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.nfs.calls import contains, listed, load, run, store
from tests.backends.nfs.conftest import Nfs, key
from tests.support.s3_server import S3Server

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
MIB = 1024 * 1024


def options_of(server: S3Server, bucket: str, **others: Any) -> dict[str, Any]:
    return {"url": f"s3://{bucket}/kv", "storage_options": {"endpoint_url": server.url}, **others}


def requests(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """Count the requests that s3fs has logged, by their names, and forget them."""
    calls = [re.match(r"CALL: (\w+)", record.getMessage()) for record in caplog.records if record.name == "s3fs"]
    caplog.clear()
    return Counter(call[1] for call in calls if call)


def test_everything_takes_one_request_and_no_listing(
    nfs: Nfs, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(backend: NfsBackend) -> None:
        caplog.set_level(logging.DEBUG, "s3fs")
        requests(caplog)
        assert await contains(backend, *range(10)) == [False] * 10
        assert requests(caplog) == {"head_object": 10}
        assert await store(backend, (0, b"zero"), (1, b"one")) == [StoreOutcome.STORED] * 2
        assert requests(caplog) == {"put_object": 2}
        assert await contains(backend, 0, 1, 2) == [True, True, False]
        assert requests(caplog) == {"head_object": 3}
        assert await load(backend, 0, 4) == (HIT, b"zero")
        assert await load(backend, 2, 4) == (MISS, bytes(4))
        assert (await load(backend, 0, 5))[0] is CORRUPT
        assert (await load(backend, 0, 0))[0] is CORRUPT
        assert requests(caplog) == {"get_object": 4, "head_object": 2}, "another size is asked for again"
        assert [(found.key, found.nbytes) for found in await listed(backend)] == [(key(0), 4), (key(1), 3)]
        requests(caplog)
        await backend.delete([key(number) for number in range(1500)])
        assert requests(caplog) == {"delete_objects": 2}
        assert await listed(backend) == []

    run(nfs(lookup_cache_seconds=0, **s3_options), work)


def test_cached_lookups_cost_no_request(nfs: Nfs, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async def work(backend: NfsBackend) -> None:
        caplog.set_level(logging.DEBUG, "s3fs")
        for _ in range(5):
            await contains(backend, 0, 1)
        await store(backend, (0, b"zero"))
        await contains(backend, 0, 1)
        assert requests(caplog) == {"head_object": 2, "put_object": 1}

    run(nfs(lookup_cache_seconds=60, **s3_options), work)


def test_a_large_object_is_sent_in_parts(nfs: Nfs, s3_server: S3Server) -> None:
    bucket = s3_server.make_bucket()
    large, small = os.urandom(12 * MIB), os.urandom(9 * MIB)

    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, large), (1, small))
        assert await load(backend, 0, len(large)) == (HIT, large)
        assert await load(backend, 1, len(small)) == (HIT, small)

    run(nfs(**options_of(s3_server, bucket, part_size="5MiB")), work)
    found = s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]
    tags = {entry["Size"]: entry["ETag"].strip('"') for entry in found}
    assert tags[len(large)].endswith("-3")
    assert "-" not in tags[len(small)], "less than two parts are sent as one"


def test_a_missing_bucket_is_named_at_open(nfs: Nfs, s3_server: S3Server) -> None:
    with pytest.raises(FileNotFoundError, match="no such bucket") as caught:
        run(nfs(**options_of(s3_server, "not-there")), lambda backend: contains(backend, 0))
    assert "not-there" in str(caught.value)


def test_a_bucket_that_vanishes_is_an_error_and_no_miss(nfs: Nfs, s3_server: S3Server) -> None:
    bucket = s3_server.make_bucket()

    async def work(backend: NfsBackend) -> None:
        await asyncio.to_thread(s3_server.client().delete_bucket, Bucket=bucket)
        with pytest.raises(OSError, match=f"bucket is gone.*{bucket}"):
            await load(backend, 0, 4)
        with pytest.raises(OSError, match="bucket"):
            await store(backend, (0, b"zero"))

    run(nfs(**options_of(s3_server, bucket)), work)


def test_an_object_in_an_archive_class_counts_as_damaged(nfs: Nfs, s3_server: S3Server) -> None:
    bucket, client = s3_server.make_bucket(), s3_server.client()

    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"))
        name = client.list_objects_v2(Bucket=bucket)["Contents"][0]["Key"]
        source = {"Bucket": bucket, "Key": name}
        client.copy_object(Bucket=bucket, Key=name, CopySource=source, StorageClass="GLACIER")
        assert await contains(backend, 0) == [True]
        assert (await load(backend, 0, 4))[0] is CORRUPT
        await backend.delete([key(0)])
        await store(backend, (0, b"zero"))
        assert await load(backend, 0, 4) == (HIT, b"zero")

    run(nfs(lookup_cache_seconds=0, **options_of(s3_server, bucket)), work)


def test_an_object_to_which_access_is_denied_counts_as_damaged_if_others_can_be_read(
    nfs: Nfs, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(backend: NfsBackend) -> None:
        assert isinstance(backend.medium, S3Store)
        fs = backend.medium._fs
        real, denied = fs._call_s3, key(0).chunk_hash.hex()

        async def call(method: str, *arguments: Any, **named: Any) -> Any:
            if method == "get_object" and denied in named["Key"]:
                answer = {"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}
                raise translate_boto_error(ClientError(answer, "GetObject"))
            return await real(method, *arguments, **named)

        await store(backend, (0, b"zero"), (1, b"some"))
        monkeypatch.setattr(fs, "_call_s3", call)
        with pytest.raises(OSError, match="Access Denied"):
            await load(backend, 0, 4)
        buffers = [memoryview(bytearray(4)) for _ in range(2)]
        assert list(await backend.load_into([key(0), key(1)], buffers)) == [CORRUPT, HIT]

    run(nfs(**s3_options), work)


def test_of_many_who_create_a_name_one_succeeds(nfs: Nfs, s3_options: dict[str, Any]) -> None:
    async def work(backend: NfsBackend) -> None:
        medium = backend.medium
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(medium.create, "records/owner", b"%d" % number) for number in range(4)]
            winners = [number for number, call in enumerate(calls) if call.result()]
        assert len(winners) == 1
        assert medium.read_small("records/owner") == b"%d" % winners[0]
        assert [entry.name for entry in medium.entries("records")] == ["owner"]

    run(nfs(**s3_options), work)


async def _fails_within(seconds: float, call: Awaitable[Any]) -> OSError:
    began = time.monotonic()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one depends on the moment
        await call
    assert time.monotonic() - began < seconds
    return caught.value


def test_a_server_that_is_killed_is_an_error_soon_and_works_again_when_it_is_back(
    nfs: Nfs, own_server: S3Server
) -> None:
    bucket = own_server.make_bucket()
    data = os.urandom(8 * MIB)

    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, data))
        killer = threading.Timer(0.1, own_server.kill)
        killer.start()
        outcomes: list[Any] = []
        began = time.monotonic()
        while not any(isinstance(outcome, OSError) for outcome in outcomes):  # loads under way when it dies
            calls = [load(backend, 0, len(data)) for _ in range(4)]
            outcomes += await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - began < 60
        killer.join()
        for outcome in outcomes:
            assert isinstance(outcome, OSError) or outcome == (HIT, data)
        slack = 5.0  # for a machine that is busy
        await _fails_within(1 + slack, load(backend, 0, len(data)))
        await _fails_within(1 + slack, store(backend, (1, b"one")))
        await _fails_within(1 + slack, contains(backend, 2, 3))
        await asyncio.to_thread(own_server.start)
        await asyncio.to_thread(own_server.make_bucket, bucket)  # it keeps nothing
        assert await load(backend, 0, len(data)) == (MISS, bytes(len(data)))
        await store(backend, (0, data))
        assert await load(backend, 0, len(data)) == (HIT, data)

    options = options_of(own_server, bucket, retry_seconds=1, lookup_cache_seconds=0)
    options["storage_options"]["config_kwargs"] = {"read_timeout": 30}  # for the server while it lives
    run(nfs(**options), work)


@pytest.mark.long
def test_requests_to_a_hung_server_time_out_unless_it_continues_in_time(nfs: Nfs, own_server: S3Server) -> None:
    bucket = own_server.make_bucket()

    async def gives_up(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"))
        own_server.pause()
        try:
            error = await _fails_within(1 + 1 + 5, load(backend, 0, 4))
            assert error.errno is not None
        finally:
            own_server.resume()
        assert await load(backend, 0, 4) == (HIT, b"zero")

    async def waits(backend: NfsBackend) -> None:
        own_server.pause()
        threading.Timer(1.0, own_server.resume).start()
        assert await load(backend, 0, 4) == (HIT, b"zero")

    run(nfs(**options_of(own_server, bucket, retry_seconds=1)), gives_up)
    patient = options_of(own_server, bucket, retry_seconds=60)
    patient["storage_options"]["config_kwargs"] = {"read_timeout": 0.3}
    run(nfs(**patient), waits)


@pytest.mark.parametrize(("error", "is_logged"), [(ConnectionResetError("lost"), False), (ValueError("defect"), True)])
def test_a_lost_connection_that_nobody_waits_for_causes_no_traceback(
    nfs: Nfs, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    async def fail() -> None:
        raise error

    async def start_and_forget() -> None:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])

    async def work(backend: NfsBackend) -> None:
        assert await store(backend, (0, b"zero")) == [StoreOutcome.STORED]
        sync(get_loop(), start_and_forget)
        gc.collect()

    run(nfs(**s3_options), work)
    said = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert [line.startswith("Task exception was never retrieved") for line in said] == [True] * is_logged


def test_a_handler_of_lost_errors_that_is_there_stays(nfs: Nfs, s3_options: dict[str, Any]) -> None:
    loop = get_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(others := lambda *_: None)
    try:
        run(nfs(**s3_options), lambda backend: store(backend, (0, b"zero")))
        assert loop.get_exception_handler() is others
    finally:
        loop.set_exception_handler(before)


def test_no_server_is_an_error_at_open(nfs: Nfs, credentials: None) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = {"endpoint_url": f"http://127.0.0.1:{nobody.getsockname()[1]}"}
        backend = nfs(url="s3://bucket/kv", storage_options=where, retry_seconds=0.2)
        with pytest.raises(OSError, match="onnect") as caught:
            run(backend, lambda backend: contains(backend, 0))
    assert caught.value.errno == errno.EIO


def test_a_small_object_is_read_with_a_bound_and_moved_aside(nfs: Nfs, s3_options: dict[str, Any]) -> None:
    async def work(backend: NfsBackend) -> None:
        medium = backend.medium
        await asyncio.to_thread(medium.write_small, "records/one", bytes(1001))
        with pytest.raises(ForeignFileError, match="more than 1000 bytes"):
            await asyncio.to_thread(medium.read_small, "records/one", 1000)
        await asyncio.to_thread(medium.move, "records/one", "aside/one")
        await asyncio.to_thread(medium.move, "records/none", "aside/none")
        assert await asyncio.to_thread(medium.sizes, ["records/one", "aside/one", "aside/none"]) == [None, 1001, None]

    run(nfs(**s3_options), work)
