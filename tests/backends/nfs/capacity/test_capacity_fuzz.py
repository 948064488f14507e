"""Random and mutated control records: an error with a name or a valid record; never a hang, or memory without bound."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from offload_backend_nfs.capacity.account_state import AccountState, EvictionBatch, Member, decode, encode
from offload_backend_nfs.capacity.control_record import (
    DamagedRecordError,
    UnknownVersionError,
    compress,
    decompress,
    read_lines,
    seal,
    unseal,
    write_lines,
)
from offload_backend_nfs.storage import layout, temporaries

from offload_core.api.keys import ObjectKey
from tests.backends.nfs.capacity.simulation import World
from tests.backends.nfs.capacity.test_capacity import GRACE, LEASE, joined, pass_time, put
from tests.backends.nfs.conftest import key
from tests.support.paths import ROOT
from tests.support.random_examples import examples

MAX_MEBIBYTES = 256
NAMES = ["a" * 16, "b" * 16]
BATCH = EvictionBatch(evictor=NAMES[1], nbytes=9, phase="condemned", withdrawn=(key(1).path,))
STATE = AccountState(
    counted=True,
    used_bytes=17,
    housekeeper=NAMES[0],
    members={NAMES[0]: Member(quota_bytes=4), NAMES[1]: Member(expired=True)},
    pending_evictions={
        NAMES[0]: EvictionBatch(evictor=NAMES[1], nbytes=9, phase="condemned", withdrawn=(key(1).path,))
    },
    recent_changes=("c" * 16,),
)
LINES = write_lines([(key(number), number * 1.5) for number in range(5)])
INTERESTING = [b"", b"\n", b"../", b"/", b"\0", b"null", b"NaN", b"-1", b"9" * 40, b"[" * 5000, b'{"a":', "٣".encode()]


@st.composite
def mutants(draw: st.DrawFn, content: bytes) -> bytes:
    """Change, cut, repeat or replace some parts of a real record."""
    mutant = content
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(mutant)))
        end = draw(st.integers(start, min(len(mutant), start + 40)))
        inserted = draw(st.one_of(st.binary(max_size=8), st.sampled_from(INTERESTING), st.just(mutant[start:end] * 2)))
        mutant = mutant[:start] + inserted + mutant[end:]
    return mutant


def bodies(real: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=300), mutants(real))


JSON = encode(STATE).partition(b"\n")[2]
RECORDS = {
    "account": st.one_of(bodies(encode(STATE)), bodies(JSON).map(lambda body: seal("account", body))),
    "condemned": st.one_of(
        bodies(seal("condemned", LINES, NAMES[0])), bodies(LINES).map(lambda body: seal("condemned", body, NAMES[0]))
    ),
    "touches": st.one_of(
        bodies(seal("touches", compress(LINES), NAMES[0])),
        bodies(compress(LINES)).map(lambda body: seal("touches", body, NAMES[0])),
        bodies(LINES).map(lambda body: seal("touches", compress(body), NAMES[0])),
    ),
}


def is_real(one: ObjectKey) -> bool:
    parts = (r"[0-9a-f]{64}", one.namespace), (r"[a-z0-9-]{1,64}", one.pack)
    return all(re.fullmatch(pattern, part) for pattern, part in parts) and 1 <= len(one.chunk_hash) <= 64


@examples(2000)
@given(RECORDS["account"])
def test_an_account_is_refused_or_all_its_values_are_possible(content: bytes) -> None:
    try:
        state = decode(content)
    except (DamagedRecordError, UnknownVersionError):
        return
    for name in (*state.members, *state.pending_evictions):
        assert re.fullmatch(r"[0-9a-f]{16}", name)
    for batch in state.pending_evictions.values():
        assert all(is_real(layout.key_of(path)) for path in batch.withdrawn)
    assert decode(encode(state)) == state


@examples(2000)
@given(st.one_of(RECORDS["condemned"], RECORDS["touches"]))
def test_a_list_is_refused_or_names_objects_only(content: bytes) -> None:
    for kind in ("condemned", "touches"):
        try:
            body = unseal(kind, content, NAMES[0])
            if kind == "touches":
                body = decompress(body, 10_000)
                assert len(body) <= 10_000
            assert all(is_real(one) for one, _ in read_lines(body))
        except (DamagedRecordError, UnknownVersionError):
            continue


def texts(real: str) -> st.SearchStrategy[str]:
    return st.one_of(st.text(max_size=100), mutants(real.encode()).map(lambda path: path.decode(errors="replace")))


@examples(500)
@given(texts(key(1).path))
def test_a_path_is_refused_or_is_one_that_the_layout_makes(path: str) -> None:
    try:
        found = layout.key_of(path)
    except ValueError:
        return
    assert found.path == path
    assert is_real(found)


@examples(500)
@given(texts(temporaries.temporary_name()))
def test_the_name_of_a_temporary_is_never_an_error(name: str) -> None:
    assert temporaries.is_temporary(name) or not temporaries.writer_is_dead(name)


@examples(200)
@given(st.data())
def test_processes_go_on_with_any_control_files(data: st.DataObject) -> None:
    world = World()
    killed, host = joined(world), joined(world)
    put(killed, range(10))
    killed.do(killed.bounded_store.step)
    killed.bounded_store.mark_used([key(1)])
    killed.do(killed.bounded_store._usage_log.flush)
    killed.kill()
    newest = max(name for name in world.files if name.startswith("account-"))
    for name in [newest, *(name for name in sorted(world.files) if "/" in name)]:
        kind = "account" if name == newest else name.partition("/")[0]
        if kind in RECORDS and data.draw(st.booleans(), label=f"damage {kind}"):
            own = mutants(world.files[name])
            world.files[name] = data.draw(st.one_of(own, RECORDS[kind]), label=name)
    late = joined(world)
    pass_time(world, [host, late], GRACE + 6 * LEASE)
    for owner in (host, late):
        assert owner.bounded_store.state.counted or "version" in str(owner.bounded_store._outage)


def test_the_largest_hostile_records_take_little_memory() -> None:
    command = [sys.executable, "-m", "tests.backends.nfs.capacity.hostile_records"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert child.returncode == 0, child.stderr
    mebibytes: dict[str, int] = json.loads(child.stdout)
    assert len(mebibytes) == 16
    assert {name: size for name, size in mebibytes.items() if not 0 <= size <= MAX_MEBIBYTES} == {}
