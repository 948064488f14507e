"""What the account of a shared prefix promises, one promise at a time, on simulated hosts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest
from offload_backend_nfs.capacity.account_state import AccountState, DamagedError, UnknownVersionError, decode, encode
from offload_backend_nfs.capacity.lease import AccountOptions, Room
from offload_backend_nfs.capacity.shared_record import Generations

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.nfs.conftest import key
from tests.backends.nfs.simulation import Host, World

GRACE = 60.0
LEASE = 60.0
OPTIONS = AccountOptions(1000, grace_seconds=GRACE, lease_seconds=LEASE)
STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED


@pytest.fixture
def world() -> World:
    return World()


def joined(world: World, options: AccountOptions = OPTIONS) -> Host:
    host = Host(world, options)
    host.do(host.place.open)
    return host


def put(host: Host, numbers: Sequence[int], size: int = 100) -> list[StoreOutcome]:
    outcomes: list[StoreOutcome] = []
    host.do(lambda: outcomes.extend(host.put([key(number) for number in numbers], [size] * len(numbers))))
    return outcomes


def pass_time(world: World, hosts: Sequence[Host], seconds: float) -> None:
    """Let time pass while every host keeps house as often as it must."""
    end = world.seconds + seconds
    while world.seconds < end:
        world.seconds += min(host.place.step_seconds for host in hosts)
        for host in hosts:
            host.do(host.place.step)


def there(world: World) -> list[int]:
    return [number for number in range(100) if key(number) in world.objects]


def hidden(host: Host, number: int) -> bool:
    return host.place.hidden([key(number)])[0]


def test_what_was_used_longest_ago_goes_first(world: World) -> None:
    host = joined(world)
    for number in range(9):
        put(host, [number])
        world.seconds += 1
    host.place.note_use([key(0), key(3)])
    world.seconds += 40  # the uses are written down
    host.do(host.place.step)
    assert put(host, [9]) == [STORED]  # above the high watermark
    pass_time(world, [host], GRACE + 20)
    assert there(world) == [0, 3, 4, 5, 6, 7, 8, 9]
    assert host.place.state.occupied_bytes == 800


def test_uses_on_another_host_count(world: World) -> None:
    keeper, other = joined(world), joined(world)
    for number in range(9):
        put(keeper, [number])
        world.seconds += 1
    other.place.note_use([key(0)])
    pass_time(world, [keeper, other], 40)
    put(keeper, [9])
    pass_time(world, [keeper, other], GRACE + 20)
    assert there(world) == [0, 3, 4, 5, 6, 7, 8, 9]


def test_condemned_objects_are_found_for_a_third_of_the_grace_and_deleted_after_it(world: World) -> None:
    keeper, other = joined(world), joined(world)
    put(keeper, range(10))
    keeper.do(keeper.place.step)
    other.do(other.place.refresh)
    assert keeper.place.state.condemned
    assert not any(hidden(host, number) for host in (keeper, other) for number in range(10))
    world.seconds += GRACE / 3
    leaving = [number for number in range(10) if hidden(other, number)]
    assert len(leaving) == 2
    assert there(world) == list(range(10))
    pass_time(world, [keeper, other], GRACE)
    assert there(world) == [number for number in range(10) if number not in leaving]
    evicted: list[ObjectKey] = []
    keeper.do(lambda: evicted.extend(keeper.place.reserve([], []).evicted))
    assert sorted(evicted) == sorted(key(number) for number in leaving)


def test_a_pin_on_another_host_holds_as_long_as_it_is_held(world: World) -> None:
    keeper, other = joined(world), joined(world)
    put(keeper, range(10))
    other.do(lambda: other.pin([key(0), key(1)]))
    keeper.do(keeper.place.step)
    assert keeper.place.state.condemned
    pass_time(world, [keeper, other], 5 * GRACE)
    assert there(world)[:2] == [0, 1]
    assert len(there(world)) <= 9
    other.unpin()
    for start in (10, 20, 30):
        put(keeper, range(start, start + 10))
        pass_time(world, [keeper, other], 2 * GRACE)
    assert 0 not in there(world)


@pytest.mark.parametrize("grace", [0.0, GRACE])
def test_what_a_process_has_pinned_itself_is_passed_over(world: World, grace: float) -> None:
    host = joined(world, AccountOptions(1000, grace_seconds=grace, lease_seconds=LEASE))
    for number in range(10):
        put(host, [number])
        world.seconds += 1
    host.do(lambda: host.pin([key(0), key(1)]))
    pass_time(world, [host], grace + 30)
    assert there(world) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_a_use_in_the_first_third_of_the_grace_spares(world: World) -> None:
    keeper, other = joined(world), joined(world)
    put(keeper, range(10))
    keeper.do(keeper.place.step)
    (batch,) = keeper.place.state.condemned
    victim = next(number for number in range(10) if key(number).path in json.loads(world.small[f"condemned/{batch}"]))
    other.do(other.place.refresh)
    other.place.note_use([key(victim)])
    pass_time(world, [keeper, other], GRACE + 20)
    assert victim in there(world)


def test_a_store_that_finds_no_room_below_the_high_watermark_has_room_made(world: World) -> None:
    host = joined(world)
    put(host, range(8))
    assert put(host, [20], size=400) == [REJECTED]
    pass_time(world, [host], GRACE + 20)
    assert put(host, [20], size=400) == [STORED]


def test_the_room_of_a_dead_process_comes_back(world: World) -> None:
    victim, other = joined(world), joined(world)
    victim.start(lambda: victim.put([key(0), key(1)], [300, 300]))
    while not victim.in_a_write:
        victim.advance()
    victim.kill()
    assert put(other, [2], size=500) == [REJECTED]
    pass_time(world, [other], 4 * LEASE)
    assert other.place.is_keeper
    assert other.place.state.occupied_bytes == world.debris_bytes == 300  # what it had begun to write still counts
    assert put(other, [2], size=500) == [STORED]


def test_a_process_that_was_stopped_for_long_writes_nothing_before_it_has_joined_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sleeper, other = joined(world), joined(world)
    rooms: list[Room | None] = []
    sleeper.do(lambda: rooms.extend(sleeper.place.reserve([key(0)], [600]).rooms))
    assert rooms[0] is not None
    pass_time(world, [other], 4 * LEASE)
    assert put(other, [1], size=600) == [STORED]
    outcomes: list[StoreOutcome] = []
    sleeper.do(lambda: outcomes.append(sleeper.place.store(key(0), memoryview(bytes(600)), rooms[0])))
    assert outcomes == [REJECTED]
    assert there(world) == [1]
    with caplog.at_level(logging.WARNING):
        sleeper.do(sleeper.place.step)
    assert "for dead" in caplog.text
    assert put(sleeper, [2], size=300) == [STORED]


def test_a_process_keeps_its_lease_while_others_are_always_faster_to_change_the_account(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    options = AccountOptions(1000, grace_seconds=0, lease_seconds=6)
    keeper, slow = joined(world, options), joined(world, options)
    outcomes: list[StoreOutcome] = []
    slow.start(lambda: outcomes.extend(slow.put([key(0)], [100])))
    for second in range(18):
        world.seconds += 1
        keeper.do(keeper.place.step)
        put(keeper, [1 + second], size=10)
        for _ in range(3):  # it creates what is there by now, lists, and reads
            slow.advance()
    slow.finish()
    keeper.do(keeper.place.step)
    slow.do(slow.place.step)
    assert outcomes == [STORED]
    assert not caplog.text


@pytest.mark.parametrize("turns", range(5))
def test_an_object_that_two_processes_delete_is_taken_out_once(world: World, turns: int) -> None:
    one, other = joined(world), joined(world)
    put(one, [0, 1])
    one.start(lambda: one.discard([key(0)]))
    while not one.place.state.condemned:
        one.advance()
    for _ in range(turns):
        one.advance()
    other.do(lambda: other.discard([key(0)]))
    one.finish()
    assert there(world) == [1]
    other.do(other.place.refresh)
    assert other.place.state.occupied_bytes == 100


def test_a_new_account_counts_what_is_there_before_anything_is_stored(world: World) -> None:
    for number in range(6):
        world.objects[key(number)] = (100, 0.0)
        world.objects[key(256 * number + 1)] = (50, 0.0)
    host = joined(world)
    assert not host.place.state.counted
    assert put(host, [50]) == [REJECTED]
    host.do(host.place.step)
    assert host.place.state.occupied_bytes == world.real_bytes
    assert put(host, [50]) == [STORED]


def test_an_account_of_another_version_is_left_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host = joined(world)
    put(host, [1])
    name = max(name for name in world.small if name.startswith("account-"))
    newer = f"account-{int(name.removeprefix('account-')) + 1:020d}"
    world.small[newer] = encode(AccountState()).replace(b"account 1 ", b"account 2 ")
    before = dict(world.small)
    with caplog.at_level(logging.WARNING):
        host.do(host.place.step)
    assert "version 2" in caplog.text
    assert put(host, [2]) == [REJECTED]
    assert {name: world.small[name] for name in before} == before or newer in world.small
    assert max(name for name in world.small if name.startswith("account-")) == newer
    host.do(lambda: host.discard([key(1)]))
    assert there(world) == []


def test_a_damaged_account_begins_anew(world: World) -> None:
    host = joined(world)
    put(host, [1, 2])
    name = max(name for name in world.small if name.startswith("account-"))
    world.small[name] = world.small[name][:-5]
    late = joined(world)
    pass_time(world, [host, late], LEASE)
    assert late.place.state.counted
    assert late.place.state.occupied_bytes == world.real_bytes
    assert put(host, [3]) == [STORED]


def test_generations_of_long_ago_are_deleted_and_cannot_be_made_again(world: World) -> None:
    sleeper, other = Host(world, OPTIONS), Host(world, OPTIONS)
    late = Generations(sleeper, lambda: 0.0, lambda _: None)
    sleeper.do(lambda: late.change(lambda state: state.model_copy(update={"used_bytes": 1})))
    record = Generations(other, lambda: 0.0, lambda _: None)
    for _ in range(100):
        other.do(lambda: record.change(lambda state: state.model_copy(update={"used_bytes": state.used_bytes + 1})))
    assert len([name for name in world.small if name.startswith("account-")]) < 40
    sleeper.do(lambda: late.change(lambda state: state.model_copy(update={"used_bytes": state.used_bytes + 1000})))
    other.do(record.refresh)
    assert record.state.used_bytes == late.state.used_bytes == 1101


def test_a_change_whose_answer_was_lost_happens_once(world: World) -> None:
    host = Host(world, OPTIONS)
    record = Generations(host, lambda: 0.0, lambda _: None)
    host.do(record.refresh)
    made: list[AccountState] = []

    def change() -> None:
        made.append(record.change(lambda state: state.model_copy(update={"used_bytes": state.used_bytes + 1})))

    host.start(change)
    host.advance()  # the listing
    host.fail_next = "after"
    host.finish()
    assert [state.used_bytes for state in made] == [1]


def test_storage_that_creates_over_what_is_there_cannot_keep_a_capacity(
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
        with pytest.raises((DamagedError, UnknownVersionError)):
            decode(bytes(changed))
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            decode(content[:length])


def test_claims_come_in_grains_so_that_the_record_is_changed_rarely(world: World) -> None:
    host = joined(world, AccountOptions(100_000, grace_seconds=GRACE, lease_seconds=LEASE, grain_bytes=2000))
    before = host.place.state.changes
    for number in range(20):
        assert put(host, [number]) == [STORED]
    assert len([name for name in host.place.state.changes if name not in before]) == 1
    pass_time(world, [host], 40)  # it is idle: what was claimed and not used goes back
    assert host.place.state.owners[host.place.owner].claim_bytes == 0
    assert host.place.state.used_bytes == 2000
