"""Damage to objects."""

from __future__ import annotations


def flipped(content: bytes, at: int = -1) -> bytes:
    """Return ``content`` with a bit of the byte at ``at`` flipped: a set byte may be there already, by chance."""
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)
