"""``offload-core check``: healthy, broken and hung tiers; the probe never stays."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.backends.disk.conftest import files_under
from tests.core.cli.conftest import Site, ended, key, words

STEPS = ("open_seconds", "store_seconds", "load_seconds", "delete_seconds")


def opened_by_the_command(gate: Path) -> int:
    """Wait until the backend arrives at its gate; the descriptor holds it there until it is closed."""
    return os.open(gate, os.O_WRONLY)


def test_healthy_tiers_are_shown_with_their_latencies(site: Site) -> None:
    kept = site.put("nvme", key(1), b"an engine's object")
    before = kept.read_bytes()
    config = site.configure({"name": "nvme"}, {"name": "shared"})
    done = site.invoke("check", config)
    assert (done.code, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["nvme", "disk", "ok"], ["shared", "disk", "ok"]]
    assert all(float(cell) > 0 for row in rows for cell in row[3:])
    assert site.files("nvme") == [kept]
    assert kept.read_bytes() == before
    assert site.files("shared") == []


def test_json_holds_latencies_in_seconds(site: Site) -> None:
    done = site.invoke("check", site.configure({"name": "nvme"}), "--json")
    assert (done.code, done.err) == (0, "")
    (tier,) = done.json["tiers"]
    assert (tier["tier"], tier["type"], tier["ok"], tier["error"]) == ("nvme", "disk", True, None)
    assert all(0 < tier[step] < 60 for step in STEPS)


@pytest.mark.parametrize(
    ("odd", "error", "done_steps"),
    [
        ({"fails": "store"}, "store: [Errno 5] the store failed", 1),
        ({"fails": "load"}, "load: [Errno 5] the load failed", 2),
        ({"lies": "room"}, "store: rejected; is there capacity for 69632 bytes?", 1),
        ({"lies": "load"}, "load: the tier returned wrong bytes: 000000000000…/check/", 2),
        ({"lies": "load count"}, "load: load_into returned 0 results for 1 keys; clause C2", 2),
        ({"lies": "load type"}, "load: load_into returned True; clause C2 requires a LoadOutcome per key", 2),
        ({"lies": "store type"}, "store: store returned None; clause C2 requires a StoreOutcome per key, in a list", 1),
        ({"lies": "corrupt"}, "load: corrupt right after the probe was stored", 2),
        ({"lies": "contains"}, "delete: the probe is still there afterwards", 4),
        ({"fails": "contains"}, "lookup: [Errno 5] the contains failed", 4),
        ({"exits": "store"}, "store: the backend has raised SystemExit: 3", 1),
        ({"exits": "contains"}, "lookup: the backend has raised SystemExit: 3", 4),
        ({"lies": "vanish"}, "load: miss right after the probe was stored", 2),
    ],
    ids=words,
)
def test_a_broken_tier_is_shown_with_its_cause_and_the_others_still_run(
    odd: dict[str, str], error: str, done_steps: int, site: Site
) -> None:
    config = site.configure({"name": "bad", "type": "odd", **odd}, {"name": "good"})
    done = site.invoke("check", config, "--json")
    assert done.code == 1
    bad, good = done.json["tiers"]
    assert bad["error"].startswith(error)
    assert [bad[step] is not None for step in STEPS] == [index < done_steps for index in range(4)]
    assert (bad["ok"], good["ok"], good["error"]) == (False, True, None)
    assert f"tier 'bad': {error}" in done.err
    assert site.files("bad") == site.files("good") == []


def test_a_tier_that_counts_as_full_until_its_scan_ends_is_waited_for(site: Site) -> None:
    done = site.invoke("check", site.configure({"name": "new", "type": "odd", "lies": "scan", "capacity": "1GiB"}))
    assert (done.code, done.err) == (0, "")
    assert site.files("new") == []


def test_the_wait_for_the_end_of_a_scan_is_limited(site: Site) -> None:
    full = {"name": "full", "type": "odd", "lies": "room", "capacity": "1GiB", "load_timeout_seconds": 0.3}
    done = site.invoke("check", site.configure(full))
    assert done.code == 1
    assert "full until a scan of its folder ends, or the capacity is too small" in done.err
    small = {"name": "small", "capacity": "4KiB"}
    assert "store: rejected; is there capacity for 69632 bytes?" in site.invoke("check", site.configure(small)).err


def test_a_full_disk_is_shown_and_nothing_is_left_on_it(site: Site, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(240 * 1024))
    done = site.run("check", site.configure({"name": "full", "path": str(small_disk)}, {"name": "good"}))
    assert done.code == 1
    assert "[Errno 28] No space left on device: stores are rejected until the disk has free space" in done.err
    assert "tier 'full': store: rejected; is there capacity for" in done.err
    assert [line.split()[2] for line in done.out.splitlines()[2:]] == ["failed", "ok"]
    assert [path.name for path in files_under(small_disk)] == ["filler"]


def test_a_probe_that_cannot_be_deleted_is_named(site: Site) -> None:
    done = site.invoke("check", site.configure({"name": "bad", "type": "odd", "fails": "delete"}))
    assert done.code == 1
    (left,) = site.files("bad")
    assert f"delete: [Errno 5] the delete failed; {'0' * 64}/check/{left.stem} may be left behind" in done.err


@pytest.mark.parametrize(("operation", "step"), [("open", "open"), ("load", "load"), ("contains", "lookup")])
def test_a_hung_tier_is_named_with_its_limit_and_does_not_hang_the_command(
    operation: str, step: str, site: Site
) -> None:
    hung = {"name": "hung", "type": "odd", "gate": str(site.gate()), "gated": operation}
    limits = {f"{name}_timeout_seconds": 0.3 for name in ("open", "lookup", "load")}
    start = time.monotonic()
    done = site.run("check", site.configure({**hung, **limits}, {"name": "good"}))
    assert time.monotonic() - start < 20
    assert done.code == 1
    assert f"tier 'hung': {step}: no answer within 0.3" in done.err
    assert f"({step}_timeout_seconds)" in done.err
    assert [line.split()[2] for line in done.out.splitlines()[2:]] == ["failed", "ok"]
    assert site.files("hung") == []


def test_a_store_that_hangs_for_ever_is_named_with_what_it_may_leave_behind(site: Site) -> None:
    hung = {"name": "hung", "type": "odd", "gate": str(site.gate()), "gated": "store", "load_timeout_seconds": 0.3}
    done = site.run("check", site.configure(hung))
    assert done.code == 1
    assert "tier 'hung': store: no answer within 0.3" in done.err
    assert f"{'0' * 64}/check/" in done.err
    assert "may be left behind (a store is still running)" in done.err


def test_the_probe_of_a_late_store_is_deleted_when_it_arrives(site: Site) -> None:
    gate = site.gate()
    late = {"name": "late", "type": "odd", "gate": str(gate), "gated": "store", "load_timeout_seconds": 0.3}
    process = site.start("check", site.configure(late, shutdown_timeout_seconds=30))
    held = opened_by_the_command(gate)
    time.sleep(0.6)  # longer than the deadline, which is what makes the store late
    os.close(held)
    done = ended(process)
    assert done.code == 1
    assert "tier 'late': store: no answer within 0.3" in done.err
    assert "left behind" not in done.err
    assert site.files("late") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: str(number.name))
def test_an_interrupted_check_deletes_its_probe(number: signal.Signals, site: Site) -> None:
    gate = site.gate()
    config = site.configure(
        {"name": "slow", "type": "odd", "gate": str(gate), "gated": "store"}, shutdown_timeout_seconds=30
    )
    process = site.start("check", config, "--json")
    held = opened_by_the_command(gate)
    process.send_signal(number)
    assert process.stderr is not None
    assert "interrupted" in process.stderr.readline()
    os.close(held)  # now the store ends, and only then can its object be deleted
    done = ended(process)
    assert (done.code, done.out, done.err) == (130, "", "")
    assert site.files("slow") == []


def test_a_second_interrupt_leaves_at_once(site: Site) -> None:
    gate = site.gate()
    slow = {"name": "slow", "type": "odd", "gate": str(gate), "gated": "store"}
    process = site.start("check", site.configure(slow, shutdown_timeout_seconds=300))
    held = opened_by_the_command(gate)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "interrupted" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    done = ended(process)
    os.close(held)
    assert done.code == 130
    assert "interrupted again: objects that this command has written may be left behind" in done.err


def test_a_backend_that_blocks_the_event_loop_is_named(site: Site) -> None:
    rude = {"name": "rude", "type": "odd", "gate": str(site.gate()), "gated": "store", "blocks": True}
    script = "from offload_core.cli import app, session; session._BLOCKED_LOOP_SECONDS = 0.3; app()"
    done = ended(site.start_process(sys.executable, "-c", script, "check", site.configure(rude)))
    assert done.code == 1
    assert "a backend has blocked the event loop for 0.3 s, which clause C8 forbids" in done.err
    assert "running: tier 'rude': store" in done.err
