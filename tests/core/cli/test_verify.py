"""``offload-core verify``: damage on a real disk tier, objects that vanish, memory."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
from pathlib import Path

import pytest

from offload_core.api.hooks import HookSpecs
from offload_core.api.keys import ObjectKey
from offload_core.cli.probes import sealed
from offload_core.objects.format import HEADER_BYTES, object_bytes
from tests.core.cli.conftest import COMMAND, FIRST, Site, key
from tests.core.cli.masking_plugin import masked
from tests.core.cli.odd_backend import OddBackend
from tests.core.tiers.test_encryption import resealed
from tests.support.paths import ROOT

MIB = 1024 * 1024


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_sound_objects_are_counted(site: Site) -> None:
    for number in range(5):
        site.put("nvme", key(number), os.urandom(1000))
    (site.path("nvme") / "foreign.kv").write_text("not an object")
    config = site.configure({"name": "nvme"})
    done = site.invoke("verify", config)
    assert (done.code, done.out) == (0, "")
    assert done.err == "tier 'nvme': 5 objects with 24.9 KiB are sound, 0 damaged\n"
    (tier,) = site.invoke("verify", config, "--json").json["tiers"]
    assert (tier["verified_objects"], tier["verified_bytes"], tier["bad"]) == (5, 5 * object_bytes(1000), [])


def test_every_kind_of_damage_is_found_and_deleted_only_when_asked(site: Site) -> None:
    sound = site.put("nvme", key(0), b"sound")
    payload, header, short, empty, renamed = (site.put("nvme", key(n), os.urandom(500)) for n in range(1, 6))
    flip(payload, HEADER_BYTES + 7)
    flip(header, 200)
    short.write_bytes(short.read_bytes()[:-1])
    empty.write_bytes(b"")
    renamed.write_bytes(sealed(key(77), b"another object"))
    config = site.configure({"name": "nvme"}, {"name": "shared"})
    done = site.invoke("verify", config, "--json")
    assert done.code == 1
    assert "tier 'nvme': 1 objects with 4.0 KiB are sound, 5 damaged" in done.err
    reasons = {int(bad["hash"][:2]): bad["reason"] for bad in done.json["tiers"][0]["bad"]}
    assert reasons == {
        1: "the payload's checksum does not match its 500 bytes",
        2: "the header's checksum does not match its bytes",
        3: "payload of 499 bytes, but the header says 500 stored and 500 raw",
        4: "0 bytes are fewer than the 4096 of the header",
        5: f"the header names another object, {key(77)}",
    }
    assert all(bad["damaged"] and bad["fingerprint"] == FIRST for bad in done.json["tiers"][0]["bad"])
    assert len(site.files("nvme")) == 6
    deleting = site.invoke("verify", config, "--delete")
    assert deleting.code == 1
    assert "5 damaged (5 deleted)" in deleting.err
    (line,) = [line for line in deleting.out.splitlines() if key(1).path in line]
    assert line.endswith("the payload's checksum does not match its 500 bytes")
    assert site.files("nvme") == [sound]
    assert site.invoke("verify", config).code == 0


def test_what_the_backend_calls_corrupt_is_damaged(site: Site) -> None:
    site.put("bad", key(1), b"x")
    done = site.invoke("verify", site.configure({"name": "bad", "type": "odd", "lies": "corrupt"}), "--delete")
    assert done.code == 1
    assert "the backend reports damage, or the object no longer has 4097 bytes" in done.out
    assert site.files("bad") == []


def test_bytes_that_only_one_read_brings_are_no_damage(site: Site) -> None:
    site.put("nvme", key(1), b"x")
    tier = {"name": "nvme", "type": "odd"}
    done = site.invoke("verify", site.configure({**tier, "lies": "other bytes at the first load"}), "--delete")
    assert (done.code, done.err) == (0, "tier 'nvme': 1 objects with 4.0 KiB are sound, 0 damaged\n")
    config = site.configure({**tier, "lies": "other bytes at each load"})
    done = site.invoke("verify", config, "--delete", "--json")
    (bad,) = done.json["tiers"][0]["bad"]
    assert (done.code, bad["damaged"]) == (1, False)
    assert bad["reason"].startswith("two reads have brought different bytes: the payload's checksum")
    assert "0 damaged, 1 could not be verified" in done.err
    assert len(site.files("nvme")) == 1


def test_objects_of_other_format_versions_are_named_and_never_deleted(site: Site) -> None:
    sound, older, newer, damaged = (site.put("nvme", key(n), os.urandom(500)) for n in range(4))
    for file, version in ((older, 1), (newer, 4)):
        file.write_bytes(resealed(file.read_bytes()[:8] + version.to_bytes(2, "little") + file.read_bytes()[10:]))
    flip(newer, HEADER_BYTES + 7)  # only a reader of that version knows whether that is damage
    flip(damaged, 8)
    done = site.invoke("verify", site.configure({"name": "nvme"}), "--delete", "--json")
    assert done.code == 1
    assert {int(bad["hash"][:2]): (bad["damaged"], bad["reason"]) for bad in done.json["tiers"][0]["bad"]} == {
        1: (False, "format version 1, of an older offload-core; this reader accepts version 2 or 3"),
        2: (False, "format version 4, of a newer offload-core; this reader accepts version 2 or 3"),
        3: (True, "the header's checksum does not match its bytes"),
    }
    assert "1 damaged (1 deleted), 2 could not be verified" in done.err
    assert sorted(site.files("nvme")) == sorted([sound, older, newer])


def test_the_stored_object_of_version_1_is_named_and_never_deleted(site: Site) -> None:
    content = (ROOT / "tests" / "golden" / "data" / "object-v1-none.bin").read_bytes()
    *_, hash_length, pack_length, namespace, chunk_hash, pack = struct.unpack_from("<8sHBBB3x32s64s64s", content)
    name = ObjectKey(namespace.hex(), pack[:pack_length].decode(), chunk_hash[:hash_length])
    file = site.put("nvme", name, b"")
    file.write_bytes(content)
    done = site.invoke("verify", site.configure({"name": "nvme"}), "--delete")
    assert done.code == 1
    assert "format version 1, of an older offload-core" in done.out
    assert file.read_bytes() == content


def test_objects_that_vanish_meanwhile_are_no_error(site: Site) -> None:
    site.put("evicting", key(1), b"x")
    done = site.invoke("verify", site.configure({"name": "evicting", "type": "odd", "lies": "vanish"}))
    assert done.code == 0
    assert "0 objects with 0 B are sound, 0 damaged, 1 vanished meanwhile" in done.err


def test_an_object_that_cannot_be_read_is_told_from_the_rest_of_its_batch_and_never_deleted(site: Site) -> None:
    for number in range(3):
        site.put("nvme", key(number), b"x")
    config = site.configure({"name": "nvme", "type": "odd", "unreadable": key(1).chunk_hash.hex()})
    done = site.invoke("verify", config, "--json", "--delete")
    assert done.code == 1
    (tier,) = done.json["tiers"]
    (bad,) = tier["bad"]
    assert (bad["reason"], bad["damaged"]) == ("load: [Errno 5] a bad sector", False)
    assert (tier["verified_objects"], tier["deleted_objects"]) == (2, 0)
    assert "1 could not be verified" in done.err
    assert len(site.files("nvme")) == 3


def test_a_hung_medium_ends_the_tier_and_not_the_command(site: Site) -> None:
    site.put("hung", key(1), b"x")
    site.put("good", key(2), b"x")
    hung = {"name": "hung", "type": "odd", "gate": str(site.gate()), "gated": "load", "load_timeout_seconds": 2}
    done = site.run("verify", site.configure(hung, {"name": "good"}), "--json")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("tier 'hung': load: no answer within 2 s (load_timeout_seconds)")
    assert [tier["verified_objects"] for tier in done.json["tiers"]] == [0, 1]


def test_memory_stays_within_staging_bytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddBackend, "peak_loading_bytes", 0)
    for number in range(24):  # in one folder, so that they are listed, and wanted, all at once
        site.put("nvme", ObjectKey(FIRST, "full-u256", bytes([7, number])), bytes(MIB // 2 - HEADER_BYTES))
    big = site.put("nvme", key(99), bytes(MIB))
    tier = {"name": "nvme", "type": "odd", "io_threads": 16}
    done = site.invoke("verify", site.configure(tier, staging_bytes="1MiB"), "--json", "--delete")
    (nvme,) = done.json["tiers"]
    assert (done.code, nvme["verified_objects"]) == (1, 24)
    assert OddBackend.peak_loading_bytes == MIB
    (bad,) = nvme["bad"]
    assert (
        bad["reason"] == "not read: 1052672 bytes are more than staging_bytes = 1048576; raise it to verify this object"
    )
    assert big.exists()


def test_a_progress_bar_is_shown_on_a_terminal_only_and_not_when_quiet(site: Site) -> None:
    site.put("nvme", key(1), b"x")
    config = site.configure({"name": "nvme"})
    assert "1/1" in _on_a_terminal(site, "verify", config)
    assert "1/1" not in _on_a_terminal(site, "verify", config, "--quiet")


def _on_a_terminal(site: Site, *arguments: str) -> str:
    """Return the output of the command on a stderr that is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**site.environment, "TERM": "xterm"}
    done = subprocess.run([COMMAND, *arguments], stderr=theirs, stdout=subprocess.PIPE, env=environment, check=False)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0, b"")
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        return terminal.read(100_000).decode()


@pytest.mark.skipif(not hasattr(HookSpecs, "offload_wrap_backend"), reason="the hook does not exist yet")
def test_objects_are_read_through_the_plugins_that_wrap_backends(site: Site) -> None:
    file = site.put("nvme", key(1), b"x")
    file.write_bytes(masked(file.read_bytes()))
    config = site.configure({"name": "nvme"})
    assert site.invoke("verify", config).code == 1
    site.install("masking", "tests.core.cli.masking_plugin")
    done = site.invoke("verify", config, "--delete")
    assert (done.code, done.err) == (0, "tier 'nvme': 1 objects with 4.0 KiB are sound, 0 damaged\n")
    assert file.exists()
