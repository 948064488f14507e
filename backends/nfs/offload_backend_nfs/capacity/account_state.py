"""What all processes on a prefix know together, and how it is written down.

One line ``offload-core account VERSION CHECKSUM``, then JSON. A version that this code does not know is not touched:
whoever meets one stores nothing, and goes on loading.
"""

from __future__ import annotations

from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

VERSION = 1
_MAGIC = b"offload-core account"


class UnknownVersionError(OSError):
    """The account was written by another version of this backend."""


class DamagedError(OSError):
    """The account's bytes are not what was written."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Owner(_Frozen):
    """A process: the bytes that it may write, or has written and not yet added to the objects."""

    claim_bytes: int = 0
    dead: bool = False
    """It has let its lease run out. Its claim counts until a scan has found out what became of it."""


class Batch(_Frozen):
    """Objects that are to go. Their keys are in a small object of their own."""

    by: str
    nbytes: int
    phase: Literal["condemned", "deleting"]
    """Condemned objects may still be spared. Of a batch that is being deleted, none comes back."""
    spared: tuple[str, ...] = ()


class AccountState(_Frozen):
    """One generation of the account.

    At every moment the bytes of all objects, whole or being written, are at most ``used_bytes`` plus all claims. By
    itself ``used_bytes`` may be below zero: what was removed may still be in the claim of who has written it.
    """

    counted: bool = False
    """Whether ``used_bytes`` is known; until the first scan it is not, and nobody may write."""
    used_bytes: int = 0
    written_bytes: int = 0
    """All bytes that ever went from a claim into ``used_bytes``."""
    removed_bytes: int = 0
    """All bytes that ever were taken out of ``used_bytes`` because their objects were removed."""
    wanted_bytes: int = 0
    """Room that somebody asked for in vain since the last eviction."""
    keeper: str = ""
    """The owner who scans and evicts, for all."""
    owners: dict[str, Owner] = {}
    condemned: dict[str, Batch] = {}
    changes: tuple[str, ...] = ()
    """Identities of the latest changes, the newest last: by them a process knows that its own is in."""

    @property
    def occupied_bytes(self) -> int:
        """Bytes of all objects and all claims."""
        return self.used_bytes + sum(owner.claim_bytes for owner in self.owners.values())

    @property
    def condemned_bytes(self) -> int:
        """Bytes that will be free again without anybody's doing."""
        return sum(batch.nbytes for batch in self.condemned.values())


def encode(state: AccountState) -> bytes:
    """Return ``state`` as it is written down."""
    body = state.model_dump_json().encode()
    return b"%s %d %s\n" % (_MAGIC, VERSION, xxhash.xxh3_128_hexdigest(body).encode()) + body


def decode(content: bytes) -> AccountState:
    """Return what :func:`encode` has written.

    Raises:
        UnknownVersionError: it is whole, but not for this code.
        DamagedError: it is not whole.
    """
    line, _, body = content.partition(b"\n")
    magic, _, rest = line.rpartition(b" ")
    name, _, version = magic.rpartition(b" ")
    if name != _MAGIC or rest != xxhash.xxh3_128_hexdigest(body).encode():
        raise DamagedError("its checksum does not match")
    if version != str(VERSION).encode():
        raise UnknownVersionError(f"it has version {version.decode()}, this backend knows {VERSION}")
    try:
        return AccountState.model_validate_json(body)
    except ValidationError as error:
        raise DamagedError(str(error)) from error
