"""The state of the account that all processes under one URL share, and its encoding.

The encoding is one line ``offload-core account VERSION CHECKSUM`` and then JSON. A process that reads an unknown
version does not change the account. It stores nothing and still loads objects.
"""

from __future__ import annotations

from typing import Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from offload_core.api import ObjectKey

VERSION = 1

# Names and values on the medium. They are part of the format: older processes read them. Never change them.
_MAGIC = b"offload-core account"
PENDING: Final = "condemned"
DELETING: Final = "deleting"
_NAMES_ON_MEDIUM = {
    "evictor": "by",
    "expired": "dead",
    "housekeeper": "keeper",
    "members": "owners",
    "pending_evictions": "condemned",
    "quota_bytes": "claim_bytes",
    "recent_changes": "changes",
    "rejected_bytes": "wanted_bytes",
    "withdrawn": "spared",
}

Phase = Literal["condemned", "deleting"]
"""The phase of an eviction batch: :data:`PENDING`, then :data:`DELETING`."""


class UnknownAccountVersionError(OSError):
    """Another version of this backend wrote the account."""


class DamagedAccountError(OSError):
    """The account's bytes differ from the bytes that were written."""


class _Stored(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        alias_generator=lambda name: _NAMES_ON_MEDIUM.get(name, name),
    )


class Member(_Stored):
    """A process that takes part in the account."""

    quota_bytes: int = 0
    """Bytes that the process may write, or has written and not yet moved to ``used_bytes``."""
    expired: bool = False
    """The process has let its lease expire. Its quota counts until a scan has found the objects that it wrote."""


class EvictionBatch(_Stored):
    """Objects that leave together. A small file of its own lists their keys."""

    evictor: str
    """The member that deletes the batch."""
    nbytes: int
    phase: Phase
    """Keys can be withdrawn from a pending batch. From a batch that is being deleted, none can be withdrawn."""
    withdrawn: tuple[str, ...] = ()
    """Paths of the keys that stay after all."""


class AccountState(_Stored):
    """One generation of the account.

    At every moment, the bytes of all objects, complete or being written, are at most ``used_bytes`` plus all quotas.
    ``used_bytes`` alone may be below zero: the bytes of a removed object may still be in its writer's quota.
    """

    counted: bool = False
    """``True`` once ``used_bytes`` is known. Until the first scan it is not known, and no process may write."""
    used_bytes: int = 0
    written_bytes: int = 0
    """All bytes that ever moved from a quota to ``used_bytes``."""
    removed_bytes: int = 0
    """All bytes that ever left ``used_bytes`` because their objects were removed."""
    rejected_bytes: int = 0
    """Bytes of the largest reservation that was rejected since the last eviction."""
    housekeeper: str = ""
    """The member that scans and evicts for all members."""
    members: dict[str, Member] = {}
    pending_evictions: dict[str, EvictionBatch] = {}
    recent_changes: tuple[str, ...] = ()
    """Identities of the latest changes, the newest last. A process finds its own change here once it has succeeded."""

    @property
    def occupied_bytes(self) -> int:
        """Bytes of all objects and all quotas."""
        return self.used_bytes + sum(member.quota_bytes for member in self.members.values())

    @property
    def pending_eviction_bytes(self) -> int:
        """Bytes that become free when the pending evictions are done."""
        return sum(batch.nbytes for batch in self.pending_evictions.values())

    def has_live(self, member_id: str) -> bool:
        """Return whether a process is a member whose lease has not expired."""
        member = self.members.get(member_id)
        return member is not None and not member.expired


def encode(state: AccountState) -> bytes:
    """Return ``state`` in its form on the medium."""
    body = state.model_dump_json(by_alias=True).encode()
    return b"%s %d %s\n" % (_MAGIC, VERSION, xxhash.xxh3_128_hexdigest(body).encode()) + body


def decode(content: bytes) -> AccountState:
    """Return the state that :func:`encode` has written.

    Raises:
        UnknownAccountVersionError: the content is complete, but this code does not know its version.
        DamagedAccountError: the content is not complete.
    """
    line, _, body = content.partition(b"\n")
    magic, _, rest = line.rpartition(b" ")
    name, _, version = magic.rpartition(b" ")
    if name != _MAGIC or rest != xxhash.xxh3_128_hexdigest(body).encode():
        raise DamagedAccountError("the checksum of the account does not match")
    if version != str(VERSION).encode():
        raise UnknownAccountVersionError(
            f"the account has version {version.decode()}, and this backend knows version {VERSION} only; "
            "run the same release of offload-core on all hosts"
        )
    try:
        return AccountState.model_validate_json(body)
    except ValidationError as error:
        raise DamagedAccountError(str(error)) from error


def parse_key(path: str) -> ObjectKey:
    """Return the key with this :attr:`ObjectKey.path`."""
    namespace, pack, chunk_hash = path.split("/")
    return ObjectKey(namespace, pack, bytes.fromhex(chunk_hash))
