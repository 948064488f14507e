"""The guarantees of the shared account, one at a time, on simulated hosts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.account_state import (
    AccountState,
    EvictionBatch,
    Member,
    decode,
    encode,
)
from offload_backend_nfs.capacity.control_record import (
    DamagedRecordError,
    UnknownVersionError,
    compress,
    decompress,
    seal,
    write_lines,
)
from offload_backend_nfs.capacity.quota import ObjectReservation
from offload_backend_nfs.capacity.shared_record import SharedRecord

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.nfs.capacity.simulation import Host, World
from tests.backends.nfs.conftest import key
from tests.support.tier_log import LOG

GRACE = 60.0
LEASE = 60.0
OPTIONS = AccountOptions(1000, grace_seconds=GRACE, lease_seconds=LEASE)
STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED


@pytest.fixture
def world() -> World:
    return World()


def joined(world: World, options: AccountOptions = OPTIONS) -> Host:
    host = Host(world, options)
    host.do(host.bounded_store.open)
    return host


def put(host: Host, numbers: Sequence[int], size: int = 100) -> list[StoreOutcome]:
    outcomes: list[StoreOutcome] = []
    host.do(lambda: outcomes.extend(host.put([key(number) for number in numbers], [size] * len(numbers))))
    return outcomes


def pass_time(world: World, hosts: Sequence[Host], seconds: float) -> None:
    """Advance the time while every host does its housekeeping on time."""
    end = world.seconds + seconds
    while world.seconds < end:
        world.seconds += min(host.bounded_store.step_seconds for host in hosts)
        for host in hosts:
            host.do(host.bounded_store.step)


def existing(world: World) -> list[int]:
    return [number for number in range(100) if key(number) in world.objects]


def hidden(host: Host, number: int) -> bool:
    return host.bounded_store.hidden([key(number)])[0]


def test_least_recently_used_objects_are_evicted_first(world: World) -> None:
    host = joined(world)
    for number in range(9):
        put(host, [number])
        world.seconds += 1
    host.bounded_store.mark_used([key(0), key(3)])
    world.seconds += 40  # the uses are flushed
    host.do(host.bounded_store.step)
    assert put(host, [9]) == [STORED]  # above the high watermark
    pass_time(world, [host], GRACE + 20)
    assert existing(world) == [0, 3, 4, 5, 6, 7, 8, 9]
    assert host.bounded_store.state.occupied_bytes == 800


def test_uses_on_another_host_count(world: World) -> None:
    housekeeper, other = joined(world), joined(world)
    for number in range(9):
        put(housekeeper, [number])
        world.seconds += 1
    other.bounded_store.mark_used([key(0)])
    pass_time(world, [housekeeper, other], 40)
    put(housekeeper, [9])
    pass_time(world, [housekeeper, other], GRACE + 20)
    assert existing(world) == [0, 3, 4, 5, 6, 7, 8, 9]


def test_pending_objects_are_found_for_a_third_of_the_grace_and_deleted_after_it(world: World) -> None:
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, range(10))
    housekeeper.do(housekeeper.bounded_store.step)
    other.do(other.bounded_store.refresh)
    assert housekeeper.bounded_store.state.pending_evictions
    assert not any(hidden(host, number) for host in (housekeeper, other) for number in range(10))
    world.seconds += GRACE / 3
    leaving = [number for number in range(10) if hidden(other, number)]
    assert len(leaving) == 2
    assert existing(world) == list(range(10))
    pass_time(world, [housekeeper, other], GRACE)
    assert existing(world) == [number for number in range(10) if number not in leaving]
    evicted: list[ObjectKey] = []
    housekeeper.do(lambda: evicted.extend(housekeeper.bounded_store.reserve([], []).evicted))
    assert sorted(evicted) == sorted(key(number) for number in leaving)


def test_a_pin_on_another_host_prevents_eviction_until_its_release(world: World) -> None:
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, range(10))
    other.do(lambda: other.pin([key(0), key(1)]))
    housekeeper.do(housekeeper.bounded_store.step)
    assert housekeeper.bounded_store.state.pending_evictions
    pass_time(world, [housekeeper, other], 5 * GRACE)
    assert existing(world)[:2] == [0, 1]
    assert len(existing(world)) <= 9
    other.unpin()
    for start in (10, 20, 30):
        put(housekeeper, range(start, start + 10))
        pass_time(world, [housekeeper, other], 2 * GRACE)
    assert 0 not in existing(world)


@pytest.mark.parametrize("grace", [0.0, GRACE])
def test_a_process_does_not_evict_its_own_pinned_objects(world: World, grace: float) -> None:
    host = joined(world, AccountOptions(1000, grace_seconds=grace, lease_seconds=LEASE))
    for number in range(10):
        put(host, [number])
        world.seconds += 1
    host.do(lambda: host.pin([key(0), key(1)]))
    pass_time(world, [host], grace + 30)
    assert existing(world) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_a_use_in_the_first_third_of_the_grace_withdraws_the_object(world: World) -> None:
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, range(10))
    housekeeper.do(housekeeper.bounded_store.step)
    (batch,) = housekeeper.bounded_store.state.pending_evictions
    victim = next(number for number in range(10) if key(number).path.encode() in world.files[f"condemned/{batch}"])
    other.do(other.bounded_store.refresh)
    other.bounded_store.mark_used([key(victim)])
    pass_time(world, [housekeeper, other], GRACE + 20)
    assert victim in existing(world)


def test_a_rejected_store_below_the_high_watermark_starts_an_eviction(world: World) -> None:
    host = joined(world)
    put(host, range(8))
    assert put(host, [20], size=400) == [REJECTED]
    pass_time(world, [host], GRACE + 20)
    assert put(host, [20], size=400) == [STORED]


def test_the_reservations_of_a_dead_process_are_released(world: World) -> None:
    victim, other = joined(world), joined(world)
    victim.start(lambda: victim.put([key(0), key(1)], [300, 300]))
    while not victim.in_a_write:
        victim.advance()
    victim.kill()
    assert put(other, [2], size=500) == [REJECTED]
    pass_time(world, [other], 4 * LEASE)
    assert other.bounded_store.is_housekeeper
    assert other.bounded_store.state.occupied_bytes == world.leftover_bytes == 300  # its unfinished write still counts
    assert put(other, [2], size=500) == [STORED]


def test_a_process_whose_lease_expired_writes_nothing_before_it_has_joined_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sleeper, other = joined(world), joined(world)
    reservations: list[ObjectReservation | None] = []
    sleeper.do(lambda: reservations.extend(sleeper.bounded_store.reserve([key(0)], [600]).reservations))
    assert reservations[0] is not None
    pass_time(world, [other], 4 * LEASE)
    assert put(other, [1], size=600) == [STORED]
    outcomes: list[StoreOutcome] = []
    sleeper.do(lambda: outcomes.append(sleeper.bounded_store.store(key(0), memoryview(bytes(600)), reservations[0])))
    assert outcomes == [REJECTED]
    assert existing(world) == [1]
    with caplog.at_level(logging.WARNING):
        sleeper.do(sleeper.bounded_store.step)
    assert "lease of this process has expired" in caplog.text
    assert put(sleeper, [2], size=300) == [STORED]


def test_a_process_keeps_its_lease_while_others_are_always_faster_to_change_the_account(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    options = AccountOptions(1000, grace_seconds=0, lease_seconds=6)
    housekeeper, slow = joined(world, options), joined(world, options)
    outcomes: list[StoreOutcome] = []
    slow.start(lambda: outcomes.extend(slow.put([key(0)], [100])))
    for second in range(18):
        world.seconds += 1
        housekeeper.do(housekeeper.bounded_store.step)
        put(housekeeper, [1 + second], size=10)
        for _ in range(3):  # it fails to create a file that exists by now, lists, and reads
            slow.advance()
    slow.finish()
    housekeeper.do(housekeeper.bounded_store.step)
    slow.do(slow.bounded_store.step)
    assert outcomes == [STORED]
    assert not caplog.text


@pytest.mark.parametrize("turns", range(5))
def test_an_object_that_two_processes_delete_is_subtracted_once(world: World, turns: int) -> None:
    one, other = joined(world), joined(world)
    put(one, [0, 1])
    one.start(lambda: one.discard([key(0)]))
    while not one.bounded_store.state.pending_evictions:
        one.advance()
    for _ in range(turns):
        one.advance()
    other.do(lambda: other.discard([key(0)]))
    one.finish()
    assert existing(world) == [1]
    other.do(other.bounded_store.refresh)
    assert other.bounded_store.state.occupied_bytes == 100


def test_a_new_account_counts_existing_objects_before_any_store(world: World) -> None:
    for number in range(6):
        world.objects[key(number)] = (100, 0.0)
        world.objects[key(256 * number + 1)] = (50, 0.0)
    host = joined(world)
    assert not host.bounded_store.state.counted
    assert put(host, [50]) == [REJECTED]
    host.do(host.bounded_store.step)
    assert host.bounded_store.state.occupied_bytes == world.real_bytes
    assert put(host, [50]) == [STORED]


def test_an_account_of_another_version_is_not_changed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host = joined(world)
    put(host, [1])
    name = max(name for name in world.files if name.startswith("account-"))
    newer = f"account-{int(name.removeprefix('account-')) + 1:020d}"
    world.files[newer] = encode(AccountState()).replace(b"account 1 ", b"account 2 ")
    before = dict(world.files)
    with caplog.at_level(logging.WARNING):
        host.do(host.bounded_store.step)
    assert "version 2" in caplog.text
    assert put(host, [2]) == [REJECTED]
    assert {name: world.files[name] for name in before} == before or newer in world.files
    assert max(name for name in world.files if name.startswith("account-")) == newer
    host.do(lambda: host.discard([key(1)]))
    assert existing(world) == []


def test_a_damaged_account_is_replaced_by_a_new_one(world: World) -> None:
    host = joined(world)
    put(host, [1, 2])
    name = max(name for name in world.files if name.startswith("account-"))
    world.files[name] = world.files[name][:-5]
    late = joined(world)
    pass_time(world, [host, late], LEASE)
    assert late.bounded_store.state.counted
    assert late.bounded_store.state.occupied_bytes == world.real_bytes
    assert put(host, [3]) == [STORED]


def test_old_generations_are_deleted_and_cannot_be_made_again(world: World) -> None:
    sleeper, other = Host(world, OPTIONS), Host(world, OPTIONS)
    late = SharedRecord(sleeper, lambda: 0.0, LOG, lambda _: None)
    sleeper.do(lambda: late.change(lambda state: state.model_copy(update={"used_bytes": 1})))
    record = SharedRecord(other, lambda: 0.0, LOG, lambda _: None)
    for _ in range(100):
        other.do(lambda: record.change(lambda state: state.model_copy(update={"used_bytes": state.used_bytes + 1})))
    assert len([name for name in world.files if name.startswith("account-")]) < 40
    sleeper.do(lambda: late.change(lambda state: state.model_copy(update={"used_bytes": state.used_bytes + 1000})))
    other.do(record.refresh)
    assert record.state.used_bytes == late.state.used_bytes == 1101


def test_a_change_whose_answer_was_lost_happens_once(world: World) -> None:
    host = Host(world, OPTIONS)
    record = SharedRecord(host, lambda: 0.0, LOG, lambda _: None)
    host.do(record.refresh)
    made: list[AccountState] = []

    def change() -> None:
        made.append(record.change(lambda state: state.model_copy(update={"used_bytes": state.used_bytes + 1})))

    host.start(change)
    host.advance()  # the listing
    host.fail_next = "after"
    host.finish()
    assert [state.used_bytes for state in made] == [1]


def test_storage_that_creates_over_an_existing_file_cannot_keep_a_capacity(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "create", lambda self, name, content: self.write(name, content) or True)
    with caplog.at_level(logging.WARNING):
        host = joined(world)
    assert "If-None-Match" in caplog.text
    assert put(host, [1]) == [REJECTED]


def test_every_byte_of_the_account_is_checked() -> None:
    content = encode(AccountState(counted=True, used_bytes=17))
    for index in range(len(content)):
        changed = bytearray(content)
        changed[index] ^= 1
        with pytest.raises((DamagedRecordError, UnknownVersionError)):
            decode(bytes(changed))
    for length in range(len(content)):
        with pytest.raises(DamagedRecordError):
            decode(content[:length])


def test_the_account_keeps_its_names_on_the_medium() -> None:
    a, b, c, d, x, y = (letter * 16 for letter in "abcd01")
    state = AccountState(
        counted=True,
        used_bytes=17,
        written_bytes=20,
        removed_bytes=3,
        rejected_bytes=5,
        housekeeper=a,
        members={a: Member(quota_bytes=4), b: Member(quota_bytes=1, expired=True)},
        pending_evictions={
            c: EvictionBatch(evictor=a, nbytes=9, phase="condemned", withdrawn=(key(1).path,)),
            d: EvictionBatch(evictor=b, nbytes=0, phase="deleting"),
        },
        recent_changes=(x, y),
    )
    content = (
        "offload-core account 1 c9b34aa3927c4f126ebaa8521976edd1\n"
        f'{{"counted":true,"used_bytes":17,"written_bytes":20,"removed_bytes":3,"wanted_bytes":5,"keeper":"{a}",'
        f'"owners":{{"{a}":{{"claim_bytes":4,"dead":false}},"{b}":{{"claim_bytes":1,"dead":true}}}},'
        f'"condemned":{{"{c}":{{"by":"{a}","nbytes":9,"phase":"condemned","spared":["{key(1).path}"]}},'
        f'"{d}":{{"by":"{b}","nbytes":0,"phase":"deleting","spared":[]}}}},"changes":["{x}","{y}"]}}'
    ).encode()
    assert encode(state) == content
    assert decode(content) == state


def test_lists_of_objects_keep_their_form_on_the_medium() -> None:
    assert seal("condemned", write_lines([(key(1), 5), (key(2), 7)]), "a" * 16) == (
        b"offload-core condemned 1 fe27aeafbe8875fc7322b41dc29c063c\n" + f"{key(1).path} 5\n{key(2).path} 7\n".encode()
    )
    body = compress(write_lines([(key(1), 5.25), (key(2), -7.0)]))
    assert seal("touches", body, "b" * 16).startswith(b"offload-core touches 1 ")
    assert decompress(body, 1000).decode() == f"{key(1).path} 5.25\n{key(2).path} -7.0\n"


def test_quotas_grow_in_units_so_that_the_record_changes_rarely(world: World) -> None:
    host = joined(world, AccountOptions(100_000, grace_seconds=GRACE, lease_seconds=LEASE, quota_unit_bytes=2000))
    before = host.bounded_store.state.recent_changes
    for number in range(20):
        assert put(host, [number]) == [STORED]
    assert len([name for name in host.bounded_store.state.recent_changes if name not in before]) == 1
    pass_time(world, [host], 40)  # it is idle, so the unused quota is returned
    assert host.bounded_store.state.members[host.bounded_store.member_id].quota_bytes == 0
    assert host.bounded_store.state.used_bytes == 2000
