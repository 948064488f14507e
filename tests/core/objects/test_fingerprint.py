"""Fingerprints and names of objects: two things that could differ in bytes never share a key (I7)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.objects.fingerprint import Json, fingerprint
from offload_core.objects.format import HEADER_BYTES, seal

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner), max_leaves=5
)
identities = st.dictionaries(st.text(max_size=2), values, max_size=4)


@given(identity=identities)
def test_the_order_of_keys_does_not_matter(identity: dict[str, Json]) -> None:
    assert fingerprint(identity) == fingerprint(dict(reversed(list(identity.items()))))


@given(first=identities, second=identities)
def test_different_identities_have_different_fingerprints(first: dict[str, Json], second: dict[str, Json]) -> None:
    assume(first != second)
    assert fingerprint(first) != fingerprint(second)


LOOK_ALIKE: list[tuple[Json, Json]] = [(1, True), (0, None), (1, "1"), ([], {}), ([[1], 2], [1, [2]]), (1, 1.5)]


@pytest.mark.parametrize(("first", "second"), LOOK_ALIKE)
def test_values_that_look_alike_differ(first: Json, second: Json) -> None:
    assert fingerprint({"key": first}) != fingerprint({"key": second})


def test_a_fingerprint_is_a_namespace_that_the_object_header_can_hold() -> None:
    namespace = fingerprint({"model": "m"})
    assert len(bytes.fromhex(namespace)) == 32
    whole = bytearray(HEADER_BYTES)
    seal(memoryview(whole), ObjectKey(namespace, "p", b"h"))
    assert whole[16:48].hex() == namespace


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", Path("p")], ids=["object", "set", "bytes", "path"])
def test_what_is_not_spelled_out_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        fingerprint({"key": value})  # type: ignore[dict-item]


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint({"key": float("nan")})


def test_a_key_has_a_path_for_file_systems_and_a_short_name_for_people() -> None:
    key = ObjectKey("ab" * 32, "window-u256-w512", b"\x00\xff")
    assert key.path == f"{'ab' * 32}/window-u256-w512/00ff"
    assert str(key) == "abababababab…/window-u256-w512/00ff"
