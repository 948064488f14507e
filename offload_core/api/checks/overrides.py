"""Subclasses that override only some of the methods that belong together.

A class that overrides one way to move objects has changed it on purpose. An inherited way would bypass the change.
"""

from __future__ import annotations


def loads_in_one_call_are_consistent(backend: object) -> bool:
    """Return whether ``load_and_check`` does the same as ``prepare_load`` and ``load_into`` of a backend."""
    return _place(backend, "load_and_check") <= min(_place(backend, "prepare_load"), _place(backend, "load_into"))


def sealing_is_consistent(backend: object) -> bool:
    """Return whether ``store_and_seal`` does the same as ``store`` of a backend."""
    return _place(backend, "store_and_seal") <= _place(backend, "store")


def lending_is_consistent(backend: object) -> bool:
    """Return whether the views of a backend's reservations have the bytes that its loads and stores move."""
    loads = _place(backend, "prepare_load") <= _place(backend, "load_into")
    return loads and _place(backend, "prepare_store") <= _place(backend, "store")


def is_overridden(backend: object, base: type, name: str) -> bool:
    """Return whether an object, or its class below ``base``, has a method ``name`` of its own."""
    return _place(backend, name) <= type(backend).__mro__.index(base)


def _place(backend: object, name: str) -> int:
    """Return the place of the first class, from the most derived one, that defines ``name``; the object is first."""
    scopes = [getattr(backend, "__dict__", {}), *(vars(one) for one in type(backend).__mro__)]
    return next(place for place, scope in enumerate(scopes) if name in scope)
