"""The state of the account that all processes under one URL share, and its encoding.

The encoding is a control record whose body is JSON. A process that reads an unknown version does not change the
account. It stores nothing and still loads objects.

Every value is checked: names that become names of files, paths of objects, and the range of numbers.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, ValidationError

from offload_backend_nfs.capacity.control_record import DamagedRecordError, seal, unseal

_KIND = "account"
_MAX_BYTES_COUNTED = 2**60
_SHOWN_CHARACTERS = 200
_MAX_ENTRIES = 20_000
"""The most members, and the most batches."""
_NAME = re.compile(r"[0-9a-f]{16}")

# Names and values on the medium. They are part of the format: older processes read them. Never change them.
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


Name = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}\z")]
"""The name of a member or a batch, and of its file."""
ObjectPath = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}/[a-z0-9-]{1,64}/([0-9a-f]{2}){1,64}\z")]
Count = Annotated[int, Field(ge=-_MAX_BYTES_COUNTED, le=_MAX_BYTES_COUNTED)]
"""A number of bytes."""


def new_name() -> str:
    """Return a name that no other member or batch has."""
    return secrets.token_hex(8)


def is_name(name: str) -> bool:
    """Return whether a name comes from :func:`new_name`."""
    return _NAME.fullmatch(name) is not None


class _Stored(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        alias_generator=lambda name: _NAMES_ON_MEDIUM.get(name, name),
    )


class Member(_Stored):
    """A process that takes part in the account."""

    quota_bytes: Count = 0
    """Bytes that the process may write, or has written and not yet moved to ``used_bytes``."""
    expired: bool = False
    """The process has let its lease expire. Its quota counts until a scan has found the objects that it wrote."""


class EvictionBatch(_Stored):
    """Objects that leave together. A small file of its own lists their keys."""

    evictor: Name | Literal[""]
    """The member that deletes the batch."""
    nbytes: Count
    phase: Phase
    """Keys can be withdrawn from a pending batch. From a batch that is being deleted, none can be withdrawn."""
    withdrawn: Annotated[tuple[ObjectPath, ...], FailFast()] = ()
    """Paths of the keys that stay after all."""


class AccountState(_Stored):
    """One generation of the account.

    At every moment, the bytes of all objects, complete or being written, are at most ``used_bytes`` plus all quotas.
    ``used_bytes`` alone may be below zero: the bytes of a removed object may still be in its writer's quota.
    """

    counted: bool = False
    """``True`` once ``used_bytes`` is known. Until the first scan it is not known, and no process may write."""
    used_bytes: Count = 0
    written_bytes: Count = 0
    """All bytes that ever moved from a quota to ``used_bytes``."""
    removed_bytes: Count = 0
    """All bytes that ever left ``used_bytes`` because their objects were removed."""
    rejected_bytes: Count = 0
    """Bytes of the largest reservation that was rejected, and for which nothing was evicted yet."""
    housekeeper: Name | Literal[""] = ""
    """The member that scans and evicts for all members."""
    members: dict[Name, Member] = {}
    pending_evictions: dict[Name, EvictionBatch] = {}
    recent_changes: tuple[Name, ...] = ()
    """Identities of the latest changes, the newest last. A process finds its own change here once it has succeeded."""

    @property
    def occupied_bytes(self) -> int:
        """Bytes of all objects and all quotas."""
        return self.used_bytes + sum(member.quota_bytes for member in self.members.values())

    @property
    def is_usable(self) -> bool:
        """``True`` if the bytes are known. Fewer than none are an error, which the next scan corrects."""
        return self.counted and self.occupied_bytes >= 0

    @property
    def pending_eviction_bytes(self) -> int:
        """Bytes that become free when the pending evictions are done."""
        return sum(batch.nbytes for batch in self.pending_evictions.values())

    @property
    def is_deleting(self) -> bool:
        """``True`` if objects may be gone whose bytes are not subtracted yet, or will soon be."""
        return any(batch.phase == DELETING for batch in self.pending_evictions.values())

    def missing_bytes(self, capacity_bytes: int) -> int:
        """Return the bytes without which the largest rejected reservation does not fit.

        They are 0 if it fits by now, and if it never can.
        """
        if not 0 < self.rejected_bytes <= capacity_bytes:
            return 0
        return max(0, self.occupied_bytes + self.rejected_bytes - capacity_bytes)

    def has_live(self, member_id: str) -> bool:
        """Return whether a process is a member whose lease has not expired."""
        member = self.members.get(member_id)
        return member is not None and not member.expired


def encode(state: AccountState) -> bytes:
    """Return ``state`` in its form on the medium."""
    return seal(_KIND, state.model_dump_json(by_alias=True).encode())


def decode(content: bytes) -> AccountState:
    """Return the state that :func:`encode` has written.

    Raises:
        UnknownVersionError: the content is complete, but this code does not know its version.
        DamagedRecordError: the content is not complete, or no account could have it.
    """
    try:
        found = json.loads(unseal(_KIND, content))
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"the account is no JSON: {error}"[:_SHOWN_CHARACTERS]) from None
    # Validation takes far more memory than parsing, so the lengths are checked before.
    for part in (found, *(found.values() if isinstance(found, dict) else ())):
        if isinstance(part, dict | list) and len(part) > _MAX_ENTRIES:
            raise DamagedRecordError(f"the account has a list of {len(part)} entries, more than {_MAX_ENTRIES}")
    try:
        return AccountState.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:_SHOWN_CHARACTERS]
        raise DamagedRecordError(f"the account's field {place!r}: {first['msg']}"[: 2 * _SHOWN_CHARACTERS]) from None
