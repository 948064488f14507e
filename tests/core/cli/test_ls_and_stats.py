"""``offload-core ls`` and ``offload-core stats``."""

from __future__ import annotations

import pytest

from offload_core.objects.format import object_bytes
from tests.core.cli.conftest import FIRST, SECOND, Site, key, words

DAY_SECONDS = 24 * 3600


@pytest.fixture
def config(site: Site) -> str:
    """Two tiers; the first has three objects of two fingerprints and two packs."""
    site.put("nvme", key(1), bytes(1000), age_seconds=2 * DAY_SECONDS)
    site.put("nvme", key(2, pack="window-u64"), bytes(2000), age_seconds=60)
    site.put("nvme", key(3, SECOND), bytes(4000), age_seconds=5)
    (site.path("nvme") / "foreign.txt").write_text("not an object")
    return site.configure({"name": "nvme"}, {"name": "shared"})


def test_ls_shows_every_object_with_its_size_and_age(site: Site, config: str) -> None:
    done = site.invoke("ls", config)
    assert (done.code, done.err) == (0, "")
    rows = sorted(line.split() for line in done.out.splitlines()[2:])
    assert [row[:6] for row in rows] == [
        ["nvme", "ab" * 8, "full-u256", "01" * 8, "5.0", "KiB"],
        ["nvme", "ab" * 8, "window-u64", "02" * 8, "6.0", "KiB"],
        ["nvme", "cd" * 8, "full-u256", "03" * 8, "7.9", "KiB"],
    ]
    assert rows[0][6].startswith("2d")
    assert rows[1][6].startswith("1m")
    assert rows[2][6].endswith("s")


def test_ls_as_json_has_whole_names_and_numbers(site: Site, config: str) -> None:
    done = site.invoke("ls", config, "--json")
    assert (done.code, done.err) == (0, "")
    found = {entry["hash"]: entry for entry in done.json["objects"]}
    assert set(found) == {"01" * 32, "02" * 32, "03" * 32}
    first = found["01" * 32]
    assert (first["tier"], first["fingerprint"], first["pack"]) == ("nvme", FIRST, "full-u256")
    assert first["bytes"] == object_bytes(1000)
    assert 2 * DAY_SECONDS <= first["age_seconds"] < 2 * DAY_SECONDS + 100
    assert [(tier["tier"], tier["truncated"]) for tier in done.json["tiers"]] == [("nvme", False), ("shared", False)]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--namespace", "ab"], {1, 2}),
        (["--namespace", "CDCD"], {3}),
        (["--pack", "full-u256"], {1, 3}),
        (["--pack", "full-u256", "--namespace", "a"], {1}),
        (["--pack", "full"], set()),
        (["--tier", "shared"], set()),
        (["--limit", "0"], {1, 2, 3}),
        (["--limit", "3"], {1, 2, 3}),
    ],
    ids=words,
)
def test_ls_selects(options: list[str], numbers: set[int], site: Site, config: str) -> None:
    done = site.invoke("ls", config, "--json", *options)
    assert (done.code, done.err) == (0, "")
    assert {int(entry["hash"][:2]) for entry in done.json["objects"]} == numbers


def test_ls_says_when_there_is_more_than_its_limit(site: Site, config: str) -> None:
    done = site.invoke("ls", config, "--json", "--limit", "2")
    assert done.code == 0
    assert len(done.json["objects"]) == 2
    assert [tier["truncated"] for tier in done.json["tiers"]] == [True, False]
    assert done.err == "tier 'nvme': there are more than 2 objects; --limit 0 lists all of them\n"


def test_ls_refuses_what_is_no_fingerprint(site: Site, config: str) -> None:
    done = site.invoke("ls", config, "--namespace", "../etc")
    assert (done.code, done.out) == (2, "")
    assert "'../etc' is not the start of a fingerprint; write 1 to 64 hexadecimal digits" in done.err


def test_stats_add_up_per_tier_fingerprint_and_pack(site: Site, config: str) -> None:
    site.put("nvme", key(4), bytes(8000), age_seconds=10)
    done = site.invoke("stats", config, "--json")
    assert (done.code, done.err) == (0, "")
    nvme, shared = done.json["tiers"]
    kinds = {(kind["fingerprint"], kind["pack"]): (kind["objects"], kind["bytes"]) for kind in nvme["kinds"]}
    assert kinds == {
        (FIRST, "full-u256"): (2, object_bytes(1000) + object_bytes(8000)),
        (FIRST, "window-u64"): (1, object_bytes(2000)),
        (SECOND, "full-u256"): (1, object_bytes(4000)),
    }
    full = next(kind for kind in nvme["kinds"] if kind["objects"] == 2)
    assert full["newest_at_seconds"] - full["oldest_at_seconds"] == pytest.approx(2 * DAY_SECONDS - 10, abs=60)
    assert nvme["total"]["objects"] == done.json["total"]["objects"] == 4
    assert nvme["total"]["bytes"] == object_bytes(0) * 4 + 15000
    assert shared["total"] == {"objects": 0, "bytes": 0, "oldest_at_seconds": None, "newest_at_seconds": None}


def test_stats_as_a_table_have_a_row_for_all_of_a_tier(site: Site, config: str) -> None:
    done = site.invoke("stats", config)
    assert (done.code, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines()[2:]]
    assert [row[:4] for row in rows] == [
        ["nvme", "ab" * 8, "full-u256", "1"],
        ["nvme", "ab" * 8, "window-u64", "1"],
        ["nvme", "cd" * 8, "full-u256", "1"],
        ["nvme", "all", "all", "3"],
        ["shared", "all", "all", "0"],
    ]
