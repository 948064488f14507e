"""``offload-core prune``: the deleted objects, the objects that stay, and the question."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from offload_core.api.backend import StoredObject
from offload_core.cli.commands.prune import Criteria
from offload_core.objects.format import object_bytes
from tests.core.cli.conftest import COMMAND, SECOND, Ended, Site, key, words

HOUR_SECONDS = 3600
SIZE = object_bytes(1000)


@pytest.fixture
def config(site: Site) -> str:
    """Objects 1 to 3 of one fingerprint, 4 and 5 of another, 1 to 5 hours old, and foreign files of ancient age."""
    for number in range(1, 6):
        object_key = key(number, SECOND) if number > 3 else key(number)
        site.put("nvme", object_key, bytes(1000), age_seconds=number * HOUR_SECONDS)
    for foreign in (site.path("nvme") / "foreign.txt", site.files("nvme")[0].with_name("notes.txt")):
        foreign.write_text("not an object")
        os.utime(foreign, (0, 0))
    return site.configure({"name": "nvme"}, {"name": "shared"})


def left(site: Site) -> set[int]:
    return {int(file.stem[:2]) for file in site.files("nvme") if file.suffix == ".kv"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--older-than", "2h30m"], {1, 2}),
        (["--older-than", "30d"], {1, 2, 3, 4, 5}),
        (["--older-than", "0s"], set()),
        (["--max-bytes", str(2 * SIZE)], {1, 2}),
        (["--max-bytes", str(2 * SIZE - 1)], {1}),
        (["--max-bytes", "1GiB"], {1, 2, 3, 4, 5}),
        (["--fingerprint", "abab"], {4, 5}),
        (["--keep-fingerprint", "ab"], {1, 2, 3}),
        (["--keep-fingerprint", "ab", "--keep-fingerprint", "cd"], {1, 2, 3, 4, 5}),
        (["--fingerprint", "cd", "--older-than", "4h30m"], {1, 2, 3, 4}),
        (["--fingerprint", "ab", "--max-bytes", str(4 * SIZE)], {1, 2, 4, 5}),
        (["--older-than", "90m", "--max-bytes", "16KiB"], {1, 2, 3}),
    ],
    ids=words,
)
def test_an_object_goes_when_it_fulfils_every_criterion(
    options: list[str], kept: set[int], site: Site, config: str
) -> None:
    done = site.invoke("prune", config, "--json", "--yes", *options)
    assert (done.code, done.err) == (0, "")
    assert left(site) == kept
    nvme, shared = done.json["tiers"]
    gone = 5 - len(kept)
    assert (nvme["objects"], nvme["bytes"]) == (5, 5 * SIZE)
    assert nvme["selected_objects"] == nvme["removed_objects"] == gone
    assert nvme["selected_bytes"] == nvme["removed_bytes"] == gone * SIZE
    assert shared["objects"] == 0
    assert sum(file.suffix == ".txt" for file in site.files("nvme")) == 2


def test_the_oldest_go_first_in_whatever_order_they_are_listed() -> None:
    listed = [StoredObject(key(number), 10, at) for number, at in enumerate((30.0, 10.0, 40.0, 20.0))]
    criteria = Criteria(None, 15, "", ())
    assert [stored.stored_at_seconds for stored in criteria.select(listed, 40)] == [10.0, 20.0, 30.0]


def test_a_dry_run_shows_what_would_go_and_deletes_nothing(site: Site, config: str) -> None:
    done = site.invoke("prune", config, "--older-than", "2h30m", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "would go" in done.out
    assert done.out.splitlines()[2].split() == ["nvme", "5", "24.9", "KiB", "3", "14.9", "KiB", "0", "0", "B"]
    assert left(site) == {1, 2, 3, 4, 5}
    document = site.invoke("prune", config, "--older-than", "2h30m", "--dry-run", "--json").json
    assert document["dry_run"] is True
    assert [(t["selected_objects"], t["removed_objects"]) for t in document["tiers"]] == [(3, 0), (0, 0)]


def test_without_a_terminal_yes_is_needed(site: Site, config: str) -> None:
    done = site.run("prune", config, "--older-than", "1h")
    assert (done.code, done.out) == (2, "")
    assert "give --yes to delete, or --dry-run to preview" in done.err
    assert left(site) == {1, 2, 3, 4, 5}
    assert site.invoke("prune", config, "--older-than", "90m", "--yes").code == 0
    assert left(site) == {1}


@pytest.mark.parametrize(("answer", "code", "kept"), [("y", 0, {1}), ("n", 1, {1, 2, 3, 4, 5})])
def test_on_a_terminal_the_operator_is_asked(answer: str, code: int, kept: set[int], site: Site, config: str) -> None:
    done = _answered(site, answer, "prune", config, "--older-than", "90m")
    assert done.code == code
    assert "Delete 4 objects with 19.9 KiB from 'nvme'? [y/N]" in done.err
    assert left(site) == kept
    assert ("nothing was deleted" in done.err) is (answer == "n")


def _answered(site: Site, answer: str, *arguments: str) -> Ended:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    try:
        done = subprocess.run(
            [COMMAND, *arguments], stdin=theirs, capture_output=True, text=True, env=site.environment, check=False
        )
    finally:
        os.close(theirs)
        os.close(ours)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_nobody_is_asked_when_nothing_would_go(site: Site, config: str) -> None:
    done = _answered(site, "n", "prune", config, "--older-than", "30d")
    assert (done.code, done.err) == (0, "")


def test_a_limit_that_the_other_criteria_leave_unmet_is_an_error(site: Site, config: str) -> None:
    done = site.invoke("prune", config, "--yes", "--fingerprint", "cd", "--max-bytes", "1KiB")
    assert done.code == 1
    assert "tier 'nvme': the remaining objects have 14.9 KiB, more than --max-bytes" in done.err
    assert left(site) == {1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give at least one of --older-than, --max-bytes, --fingerprint and --keep-fingerprint"),
        (["--older-than", "soon"], "'soon' is not a duration; write one such as 30d, 12h or 1h30m"),
        (["--older-than", "-3d"], "'-3d' is not a duration"),
        (["--older-than", "30"], "'30' is not a duration"),
        (["--max-bytes", "much"], "'much' is not a size; write a number of bytes or a size such as 100GiB"),
        (["--older-than", "1h-30m"], "'1h-30m' is not a duration"),
        (["--older-than", "5mm"], "'5mm' is not a duration"),
        (["--max-bytes", "1,5GiB"], "'1,5GiB' is not a size"),
        (["--max-bytes", "-1"], "'-1' is not a size"),
        (["--fingerprint", ""], "'' is not the start of a fingerprint"),
        (["--keep-fingerprint", "xyz"], "'xyz' is not the start of a fingerprint"),
    ],
    ids=words,
)
def test_criteria_that_make_no_sense_are_refused(options: list[str], message: str, site: Site, config: str) -> None:
    done = site.invoke("prune", config, "--yes", *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert left(site) == {1, 2, 3, 4, 5}


def test_a_deletion_that_fails_is_named_and_what_went_is_counted(site: Site) -> None:
    for tier in ("bad", "good"):
        site.put(tier, key(1), b"x", age_seconds=60)
    config = site.configure({"name": "bad", "type": "odd", "fails": "delete"}, {"name": "good"})
    done = site.invoke("prune", config, "--json", "--yes", "--older-than", "1s")
    assert done.code == 1
    assert "tier 'bad': delete: [Errno 5] the delete failed" in done.err
    counted = [(tier["selected_objects"], tier["removed_objects"]) for tier in done.json["tiers"]]
    assert counted == [(1, 0), (1, 1)]
