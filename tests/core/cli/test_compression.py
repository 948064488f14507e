"""The commands on tiers with compression: written as the engine writes, checked to the last raw byte."""

from __future__ import annotations

import pytest

from offload_core.cli.probes import sealed
from offload_core.objects import format as object_format
from offload_core.objects.compression import compress
from offload_core.objects.format import HEADER_BYTES, Codec, object_bytes
from tests.core.cli.conftest import Site, key
from tests.core.objects.test_codecs import bf16_normal

PAYLOAD = bf16_normal(5001)


def put_compressed(site: Site, number: int, codec: Codec, raw_checksum: bytes | None = None) -> int:
    """Put a compressed object onto the tier ``nvme``; returns its size."""
    source = sealed(key(number), PAYLOAD)
    header = object_format.verify(source, key(number))
    target = memoryview(bytearray(len(source)))
    used = compress(header, source, target, codec, 1)
    assert used is not None
    if raw_checksum is not None:
        stored = object_format.verify_stored(target[:used], key(number))
        object_format.write_header(target, stored._replace(raw_checksum=raw_checksum))
    site.put("nvme", key(number), PAYLOAD).write_bytes(target[:used])
    return used


@pytest.mark.parametrize("configured", ["none", "zstd-planes"])
def test_verify_decompresses_whatever_the_tier_is_set_to(site: Site, configured: str) -> None:
    sizes = [put_compressed(site, number, codec) for number, codec in ((1, Codec.ZSTD), (2, Codec.ZSTD_PLANES))]
    config = site.configure({"name": "nvme", "compression": configured})
    done = site.invoke("verify", config, "--json")
    assert done.code == 0, done.err
    (tier,) = done.json["tiers"]
    assert (tier["verified_objects"], tier["verified_bytes"], tier["bad"]) == (2, sum(sizes), [])
    assert all(size < object_bytes(len(PAYLOAD)) for size in sizes)
    put_compressed(site, 3, Codec.ZSTD_PLANES, raw_checksum=bytes(16))
    done = site.invoke("verify", config, "--json", "--delete")
    assert done.code == 1
    (bad,) = done.json["tiers"][0]["bad"]
    assert bad["reason"] == "codec 2: the raw checksum does not match the decoded bytes"
    assert len(site.files("nvme")) == 2


@pytest.mark.parametrize("compression", ["zstd", "zstd-planes"])
def test_check_and_bench_use_the_tier_as_it_is_configured(site: Site, compression: str) -> None:
    config = site.configure({"name": "nvme", "compression": compression})
    done = site.invoke("check", config)
    assert done.code == 0, done.err
    done = site.invoke("bench", config, "--object-size", "64KiB", "--objects", "8", "--json")
    assert done.code == 0, done.err
    operations = done.json["tiers"][0]["operations"]
    assert operations["store"]["bytes"] == operations["load"]["bytes"] == 8 * (64 * 1024 + HEADER_BYTES)
    assert site.files("nvme") == []


def test_compression_on_a_backend_that_tells_no_sizes_is_an_error_of_the_tier(site: Site) -> None:
    done = site.invoke("check", site.configure({"name": "bad", "type": "odd", "compression": "zstd"}, {"name": "good"}))
    assert done.code == 1
    assert "cannot compress, since its backend does not say how large stored objects are" in done.err
