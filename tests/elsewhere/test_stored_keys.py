"""The keys that another system has stored, with their sizes."""

from __future__ import annotations

from offload_core.elsewhere.stored_keys import StoredKeys


def test_beyond_the_limit_the_first_keys_are_forgotten() -> None:
    stored: StoredKeys[str] = StoredKeys(2)
    assert stored.add([("a", 1), ("b", 2)]) == ([("a", 1), ("b", 2)], [])
    assert stored.add([("a", 1)]) == ([], []), "it is no new key"
    assert stored.add([("c", 3)]) == ([("c", 3)], [("a", 1)])
    assert stored.remove(["a", "c"]) == [0, 3]
    assert stored.page(9, None, str, lambda key: True) == [("b", 2)]


def test_the_last_size_of_a_key_counts() -> None:
    stored: StoredKeys[str] = StoredKeys(2)
    stored.add([("a", 1), ("b", 2)])
    assert stored.add([("a", 7), ("b", 2)]) == ([("a", 7)], [("a", 1)])
    assert stored.add([("a", 1), ("a", 8)]) == ([("a", 8)], [("a", 7)]), "twice in one call"
    assert stored.remove(["a", "b"]) == [8, 2]
