"""A bucket that fails: its server is killed, stopped and started again, and its objects are damaged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.child.bucket import BucketStorage, nixl_params
from offload_backend_nixl.naming import key_of, name_of
from offload_backend_nixl.protocol import MAX_ENTRIES, can_carry

from offload_core.api import LoadOutcome, StoreOutcome
from tests.backends.nixl.conftest import Nixl, key
from tests.support.clusters.nixl import BucketLab
from tests.support.s3_server import S3_CREDENTIALS

SIZE = 5000


@pytest.fixture
def own_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketLab]:
    """A server that the test may hurt."""
    lab = BucketLab()
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    lab.start()
    yield lab
    lab.stop()


def tier(lab: BucketLab, **keys: Any) -> dict[str, Any]:
    keys = lab.tier(ring="16MiB", **keys)
    del keys["type"]
    return keys


def source(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


async def expect_failures(backend: Any, lab: BucketLab, within_seconds: float) -> None:
    """Every operation fails in time, and names the place."""
    buffer = bytearray(b"\xa5" * SIZE)
    for call in (
        backend.contains([key(1)]),
        backend.load_into([key(1)], [memoryview(buffer)]),
        backend.store([key(2)], [source(2)]),
        backend.delete([key(3)]),
    ):
        began = time.monotonic()
        with pytest.raises(OSError, match=r"127\.0\.0\.1|did not answer"):
            await call
        assert time.monotonic() - began < within_seconds, f"a call took {time.monotonic() - began:.1f} s"
    assert buffer == b"\xa5" * SIZE, "a failed load touched its buffer"


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.long
def test_a_store_that_goes_and_returns(nixl: Nixl, own_lab: BucketLab, how: str) -> None:
    server = own_lab.parts["server"]

    async def run() -> None:
        backend = nixl(**tier(own_lab, transfer_timeout_seconds=10))
        await backend.open()
        assert await backend.store([key(1)], [source(1)]) == [StoreOutcome.STORED]
        server.kill() if how == "killed" else server.pause()
        await expect_failures(backend, own_lab, within_seconds=25)
        if how == "killed":
            server.start()
            own_lab.server.make_bucket(own_lab.bucket)
        else:
            server.resume()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert await backend.store([key(2)], [source(2)]) == [StoreOutcome.STORED]
                break
            except OSError:
                assert time.monotonic() < deadline, "the store is back, and the tier does not notice"
                await asyncio.sleep(0.1)
        buffers = [bytearray(SIZE) for _ in range(2)]
        outcomes = await backend.load_into([key(1), key(2)], [memoryview(buffer) for buffer in buffers])
        first = LoadOutcome.MISS if how == "killed" else LoadOutcome.HIT  # the server keeps objects in memory
        assert outcomes == [first, LoadOutcome.HIT]
        assert buffers[1] == source(2)
        await backend.close()

    asyncio.run(run())


@pytest.mark.long
def test_a_bucket_that_is_gone_is_an_error_and_no_miss(nixl: Nixl, bucket_lab: BucketLab) -> None:
    async def run() -> None:
        bucket = bucket_lab.server.make_bucket()
        keys = tier(bucket_lab)
        keys["params"]["bucket"] = bucket
        backend = nixl(**keys)
        await backend.open()
        assert await backend.contains([key(1)]) == [False]
        bucket_lab.server.client().delete_bucket(Bucket=bucket)

        async def ask() -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                await backend.contains([key(1)])

        with pytest.raises(OSError, match=f"there is no bucket {bucket}"):
            await ask()
        await backend.close()
        keys["params"]["bucket"] = "never-made"
        never = nixl(**keys)
        with pytest.raises(
            OSError, match=r"there is no bucket never-made at http.*create it, or correct params.bucket"
        ):
            await never.open()
        await never.close()

    asyncio.run(run())


def test_damaged_objects_are_corrupt(nixl: Nixl, bucket_lab: BucketLab, bucket_options: dict[str, Any]) -> None:
    client, bucket = bucket_lab.server.client(), bucket_options["params"]["bucket"]

    def name(number: int) -> str:
        return f"{bucket_options['prefix']}/{name_of(key(number))}"

    async def run() -> None:
        backend = nixl(**bucket_options)
        await backend.open()
        assert await backend.store([key(1), key(2)], [source(1), source(2)]) == [StoreOutcome.STORED] * 2
        whole = {number: client.get_object(Bucket=bucket, Key=name(number))["Body"].read() for number in (1, 2)}
        bodies = {
            "empty": b"",
            "cut in its head": whole[1][:20],
            "cut by a byte": whole[1][:-1],
            "longer": whole[1][:-1] + b"x" + whole[1][-1:],
            "of another key": whole[2],
            "foreign": b"x" * len(whole[1]),
        }
        for how, body in bodies.items():
            client.put_object(Bucket=bucket, Key=name(1), Body=body)
            buffer = bytearray(SIZE)
            assert await backend.load_into([key(1)], [memoryview(buffer)]) == [LoadOutcome.CORRUPT], how
        client.put_object(Bucket=bucket, Key=name(1), Body=whole[1])
        assert await backend.load_into([key(1)], [memoryview(buffer)]) == [LoadOutcome.HIT]
        assert buffer == source(1)
        await backend.close()

    asyncio.run(run())


def test_a_listing_passes_over_keys_that_no_message_can_have(
    nixl: Nixl, bucket_lab: BucketLab, bucket_options: dict[str, Any]
) -> None:
    """S3 allows keys of 1,024 bytes. A whole part of a listing may have none but these."""
    client, bucket = bucket_lab.server.client(), bucket_options["params"]["bucket"]

    async def run() -> None:
        backend = nixl(**bucket_options)
        await backend.open()
        await backend.store([key(1)], [source(1)])
        for number in range(MAX_ENTRIES + 2):
            name = f"{bucket_options['prefix']}/{number:03}{'x' * 700}"
            await asyncio.to_thread(client.put_object, Bucket=bucket, Key=name, Body=b"")
        assert [found.key async for batch in backend.list_objects() for found in batch] == [key(1)]
        await backend.close()

    asyncio.run(run())


def test_a_part_of_a_listing_is_one_request_also_among_foreign_keys(
    bucket_lab: BucketLab, bucket_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = BucketStorage(bucket_options["params"], {}, bucket_options["prefix"], 60)
    names = [f"{number}{'x' * 700}" for number in range(6)] + [f"7{'x' * 700}{number}" for number in range(6)]
    names += ["65", "7x", "9"]
    bucket = bucket_options["params"]["bucket"]
    bucket_lab.server.fill(bucket, {f"{bucket_options['prefix']}/{name}": b"" for name in names})
    requests: list[str] = []
    ask = storage._ask

    def counting(method: str, *arguments: Any, **named: Any) -> Any:
        requests.append(method)
        return ask(method, *arguments, **named)

    monkeypatch.setattr(storage, "_ask", counting)
    listed: list[str] = []
    parts, more = 0, True
    while more:
        entries, more = storage.list_after(listed[-1] if listed else "", 2)
        assert entries or not more
        assert all(can_carry(entry.name) for entry in entries)
        listed += [entry.name for entry in entries]
        parts += 1
        assert len(requests) == parts < 10
    assert [name for name in listed if len(name) < 100] == ["65", "7x", "9"]
    assert listed == sorted(set(listed))
    assert all(key_of(name) is None for name in listed)


def test_a_listing_that_cannot_pass_over_foreign_keys_is_an_error(
    bucket_lab: BucketLab, bucket_options: dict[str, Any]
) -> None:
    storage = BucketStorage(bucket_options["params"], {}, bucket_options["prefix"], 60)
    names = ["\U0010ffff" * 200 + str(number) for number in range(5)]
    bucket = bucket_options["params"]["bucket"]
    bucket_lab.server.fill(bucket, {f"{bucket_options['prefix']}/{name}": b"" for name in names})
    (entry,), more = storage.list_after("", 2)
    assert more
    with pytest.raises(OSError, match="foreign names"):
        storage.list_after(entry.name, 2)


@pytest.mark.long
def test_many_objects_are_listed_in_parts(nixl: Nixl, bucket_options: dict[str, Any]) -> None:
    async def run() -> None:
        backend = nixl(**bucket_options)
        await backend.open()
        keys = [key(number) for number in range(150)]
        await backend.store(keys, [source(1)] * len(keys))
        listed = [found async for batch in backend.list_objects() for found in batch]
        assert sorted(found.key for found in listed) == sorted(keys)
        assert {found.nbytes for found in listed} == {SIZE}
        await backend.close()

    asyncio.run(run())


@pytest.mark.needs_no_nixl
def test_the_region_of_awss_own_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-central-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert nixl_params({"bucket": "kv"}, {})["region"] == "eu-central-1"
    assert nixl_params({"bucket": "kv", "region": "us-west-2"}, {})["region"] == "us-west-2"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert nixl_params({"bucket": "kv"}, {})["region"] == "eu-west-1"
