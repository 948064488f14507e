"""``offload-core bench``: its measurements, and no objects that stay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from offload_core.objects.format import object_bytes
from tests.backends.disk.conftest import files_under
from tests.core.cli.conftest import Site, ended, key, words

SMALL = ["--object-size", "64KiB", "--objects", "20"]


def test_every_operation_has_throughput_and_percentiles(site: Site) -> None:
    kept = site.put("nvme", key(1), b"an engine's object")
    config = site.configure({"name": "nvme"}, {"name": "shared"})
    done = site.invoke("bench", config, *SMALL, "--concurrency", "3", "--json")
    assert done.code == 0, done.err
    assert [tier["tier"] for tier in done.json["tiers"]] == ["nvme", "shared"]
    nvme = done.json["tiers"][0]
    assert (nvme["concurrency"], nvme["error"]) == (3, None)
    assert list(nvme["operations"]) == ["store", "lookup", "load"]
    for name, operation in nvme["operations"].items():
        assert operation["calls"] == 20
        assert operation["bytes"] == (0 if name == "lookup" else 20 * object_bytes(64 * 1024))
        assert 0 < operation["p50_seconds"] <= operation["p90_seconds"] <= operation["p99_seconds"] < 60
        assert operation["calls_per_second"] == pytest.approx(20 / operation["seconds"])
    assert nvme["operations"]["lookup"]["bytes_per_second"] is None
    assert site.files("nvme") == [kept]
    assert site.files("shared") == []


def test_the_table_shows_rates_in_readable_units(site: Site) -> None:
    done = site.invoke("bench", site.configure({"name": "nvme"}), *SMALL)
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["nvme", name, "20"] for name in ("store", "lookup", "load")]
    assert rows[0][5] in {"KiB/s", "MiB/s", "GiB/s"}
    assert done.err == "tier 'nvme': 20 objects of 64.0 KiB, 4 at a time\n"


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ({"fails": "store"}, "store: [Errno 5] the store failed"),
        ({"fails": "load"}, "load: [Errno 5] the load failed"),
        ({"fails": "contains"}, "lookup: [Errno 5] the contains failed"),
        ({"lies": "room"}, "store: rejected; is there capacity for 20 objects?"),
        ({"lies": "load"}, "load: the tier returned wrong bytes: 000000000000…/bench/"),
        ({"lies": "load type"}, "load: load_into returned True; clause C2 requires a LoadOutcome per key"),
        ({"lies": "store type"}, "store: store returned None; clause C2 requires a StoreOutcome per key"),
        ({"lies": "vanish"}, "load: miss for an object that was stored"),
    ],
    ids=words,
)
def test_a_broken_tier_is_named_and_left_clean_and_the_others_are_measured(
    odd: dict[str, str], error: str, site: Site
) -> None:
    config = site.configure({"name": "bad", "type": "odd", **odd}, {"name": "good"})
    done = site.invoke("bench", config, *SMALL, "--json")
    assert done.code == 1
    assert done.json["tiers"][0]["error"].startswith(error)
    assert done.json["tiers"][1]["operations"]["load"]["calls"] == 20
    assert site.files("bad") == site.files("good") == []


def test_a_tier_that_counts_as_full_until_its_scan_ends_is_measured_after_it(site: Site) -> None:
    new = {"name": "new", "type": "odd", "lies": "scan", "capacity": "1GiB"}
    done = site.invoke("bench", site.configure(new), *SMALL, "--json")
    assert done.code == 0, done.err
    (tier,) = done.json["tiers"]
    assert [operation["calls"] for operation in tier["operations"].values()] == [20, 20, 20]
    assert site.files("new") == []


def test_on_a_full_disk_everything_is_removed_again(site: Site, small_disk: Path) -> None:
    done = site.invoke("bench", site.configure({"name": "full", "path": str(small_disk)}), *SMALL)
    assert done.code == 1
    assert "tier 'full': store: rejected; is there capacity for 20 objects?" in done.err
    assert files_under(small_disk) == []


def test_an_interrupted_bench_deletes_its_objects_and_nothing_else(site: Site) -> None:
    kept = site.put("slow", key(1), b"an engine's object")
    gate = site.gate()
    config = site.configure(
        {"name": "slow", "type": "odd", "gate": str(gate), "gated": "load"}, shutdown_timeout_seconds=30
    )
    process = site.start("bench", config, *SMALL, "--concurrency", "1")
    held = os.open(gate, os.O_WRONLY)  # everything is stored, and the first load has begun
    assert len(site.files("slow")) == 21
    process.send_signal(signal.SIGINT)
    done = ended(process)
    os.close(held)
    assert (done.code, done.out) == (130, "")
    assert "interrupted" in done.err
    assert "left behind" not in done.err
    assert site.files("slow") == [kept]


def test_objects_are_deleted_also_when_every_thread_of_the_tier_hangs(site: Site) -> None:
    hung = {"name": "hung", "type": "odd", "gate": str(site.gate()), "gated": "load", "load_timeout_seconds": 2}
    done = site.run("bench", site.configure(hung), *SMALL, "--concurrency", "9")
    assert done.code == 1
    assert "tier 'hung': load: no answer within 2 s (load_timeout_seconds)" in done.err
    assert "left behind" not in done.err
    assert site.files("hung") == []


def test_a_tier_without_room_for_all_objects_is_told_from_one_that_loses_them(site: Site) -> None:
    config = site.configure({"name": "small", "type": "odd", "lies": "keep one"})
    done = site.invoke("bench", config, *SMALL, "--concurrency", "1", "--json")
    (small,) = done.json["tiers"]
    assert (done.code, small["evicted_objects"]) == (1, 19)
    assert small["error"] == (
        "lookup: 19 of 20 objects that were stored are missing; "
        "the tier evicted 19 objects to free capacity: use fewer or smaller ones"
    )
    assert site.files("small") == []
    assert site.invoke("bench", config, "--objects", "1").code == 0


def test_more_than_staging_bytes_is_refused_before_anything_is_written(site: Site) -> None:
    config = site.configure({"name": "nvme"}, staging_bytes="1MiB")
    done = site.invoke("bench", config, "--concurrency", "4")
    assert (done.code, done.out) == (2, "")
    assert "4 calls at a time with objects of 2.0 MiB need 10.3 MiB of memory" in done.err
    assert "more than staging_bytes = 1.0 MiB; lower --concurrency or --object-size" in done.err
    assert not site.path("nvme").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--object-size", "big"], "'big' is not a size"),
        (["--objects", "0"], "Invalid value for '--objects'"),
        (["--concurrency", "0"], "Invalid value for '--concurrency'"),
    ],
    ids=words,
)
def test_sizes_that_make_no_sense_are_refused(options: list[str], message: str, site: Site) -> None:
    done = site.invoke("bench", site.configure({"name": "nvme"}), *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
