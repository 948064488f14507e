"""The commands on tiers with encryption: written as the engine writes, authenticated where the key is there."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from offload_core.cli.probes import sealed
from offload_core.config.encryption_keys import parse_keys
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from tests.core.cli.conftest import Site, key
from tests.core.tiers.test_encryption import resealed
from tests.support.damage import flipped

KEYS = f"now:{base64.b64encode(os.urandom(32)).decode()}"
OTHER = f"now:{base64.b64encode(os.urandom(32)).decode()}"
VARIABLE = "OFFLOAD_CORE_NVME_ENCRYPTION_KEYS"
ENCRYPTED = {"name": "nvme", "encryption": "aes-256-gcm"}
PAYLOAD = os.urandom(5000)


def put_encrypted(site: Site, number: int) -> Path:
    """Put an encrypted object onto the tier ``nvme``."""
    name = key(number)._replace(pack="full-u256-aes-now")
    path = site.put("nvme", name, PAYLOAD)
    source = sealed(name, PAYLOAD)
    target = memoryview(bytearray(len(source)))
    parse_keys(KEYS).encrypt(object_format.verify(source, name), name, source, target)
    path.write_bytes(target)
    return path


@pytest.mark.parametrize("compression", ["none", "zstd-planes"])
def test_check_and_bench_encrypt_and_decrypt(site: Site, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEYS)
    config = site.configure({**ENCRYPTED, "compression": compression})
    done = site.invoke("check", config)
    assert done.code == 0, done.err
    done = site.invoke("bench", config, "--object-size", "64KiB", "--objects", "8", "--json")
    assert done.code == 0, done.err
    operations = done.json["tiers"][0]["operations"]
    assert operations["store"]["bytes"] == operations["load"]["bytes"] == 8 * (64 * 1024 + HEADER_BYTES)
    assert site.files("nvme") == []


def test_verify_authenticates_with_the_key_and_says_so_without(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    forged, damaged = put_encrypted(site, 1), put_encrypted(site, 2)
    put_encrypted(site, 3)
    site.put("nvme", key(3), PAYLOAD)  # a plain object of an engine without encryption
    forged.write_bytes(resealed(flipped(forged.read_bytes())))
    damaged.write_bytes(flipped(damaged.read_bytes()))

    done = site.invoke("verify", site.configure({"name": "nvme"}), "--json", "--delete")
    (tier,) = done.json["tiers"]
    assert (tier["verified_objects"], tier["unauthenticated_objects"], tier["deleted_objects"]) == (3, 2, 1)
    assert not damaged.exists()
    done = site.invoke("verify", site.configure({"name": "nvme"}))
    assert done.code == 0
    assert "3 objects" in done.err
    assert "2 of them were not authenticated, since their keys are not here" in " ".join(done.err.split())

    monkeypatch.setenv(VARIABLE, OTHER)
    done = site.invoke("verify", site.configure(ENCRYPTED), "--json", "--delete")
    (tier,) = done.json["tiers"]
    assert (tier["unauthenticated_objects"], tier["deleted_objects"]) == (2, 0)

    monkeypatch.setenv(VARIABLE, KEYS)
    done = site.invoke("verify", site.configure(ENCRYPTED), "--json", "--delete")
    assert done.code == 1
    (tier,) = done.json["tiers"]
    assert (tier["verified_objects"], tier["unauthenticated_objects"], tier["deleted_objects"]) == (2, 0, 1)
    assert "not authentic under the key 'now'" in tier["bad"][0]["reason"]
    assert not forged.exists()


def test_a_key_is_shown_by_no_command(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEYS[:-8])
    done = site.invoke("check", site.configure(ENCRYPTED))
    assert done.code == 2
    assert VARIABLE in done.err
    assert KEYS[4:24] not in done.err + done.out
