"""Hint envelopes: checked actions, and the answer to each.

An envelope has a ``protocol_version``, a ``message_id`` and ``actions``. Each action has an ``action_id``, an
``action_type``, an ``action_version`` and a ``payload``. Nothing in it is trusted: it comes from clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROTOCOL_VERSION = "0.1"
ACTION_VERSION = "1.0"
MAX_ACTIONS = 16
"""Most actions of one envelope."""
MAX_NAME_CHARACTERS = 200
"""Most characters of an id, so that an answer stays small."""
LONGEST_RETENTION_SECONDS = 30 * 24 * 3600.0

_Tokens = Annotated[int, Field(gt=0)]


class _Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PrefixPayload(_Payload):
    """The payload of ``kv.pin``, ``kv.unpin`` and ``kv.prefetch``."""

    tokens: _Tokens | None = None
    """Length of the prefix; ``None``: all of it."""


class RetainPayload(PrefixPayload):
    """The payload of ``kv.retain``."""

    seconds: Annotated[float, Field(gt=0, le=LONGEST_RETENTION_SECONDS, allow_inf_nan=False)]


class DemotePayload(_Payload):
    """The payload of ``kv.demote``."""

    from_tokens: Annotated[int, Field(ge=0)] = 0
    """End of the prefix that stays as it is, since others share it."""


Payload = PrefixPayload | RetainPayload | DemotePayload

_PAYLOADS: Mapping[str, type[Payload]] = {
    "kv.retain": RetainPayload,
    "kv.pin": PrefixPayload,
    "kv.unpin": PrefixPayload,
    "kv.prefetch": PrefixPayload,
    "kv.demote": DemotePayload,
}
GOOD_ACTIONS = ", ".join(_PAYLOADS)


@dataclass
class Action:
    """One action, and its answer once there is one.

    Args:
        payload: ``None`` for a refused action.
        status: ``None`` while it waits for the end of its request.
        reason: of a refusal.
        tokens: length of the prefix that an accepted action is about.
    """

    action_id: str
    action_type: str
    payload: Payload | None
    status: Literal["accepted", "refused"] | None = None
    reason: str = ""
    tokens: int | None = None

    def accept(self, tokens: int) -> None:
        """Answer that the engine acts on it, for a prefix of so many tokens."""
        self.status, self.tokens = "accepted", tokens

    def refuse(self, reason: str) -> None:
        """Answer that the engine does not act on it."""
        self.status, self.reason = "refused", reason

    def answer(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        answer: dict[str, Any] = {
            "action_id": self.action_id,
            "action_type": self.action_type,
            "status": self.status or "refused",
        }
        if self.status == "accepted":
            answer["tokens"] = self.tokens
        else:
            answer["reason"] = self.reason
        return answer


@dataclass
class Envelope:
    """The actions of one envelope.

    Args:
        reason: why the envelope as a whole is refused; it has no actions then.
    """

    message_id: str
    actions: list[Action] = field(default_factory=list)
    reason: str = ""

    def answer(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        answer: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "message_id": self.message_id}
        if self.reason:
            return answer | {"status": "refused", "reason": self.reason}
        return answer | {"actions": [action.answer() for action in self.actions]}


class _RawAction(_Payload):
    action_id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    action_type: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    action_version: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    payload: dict[str, Any]


class _RawEnvelope(_Payload):
    protocol_version: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    message_id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    actions: Annotated[list[_RawAction], Field(max_length=MAX_ACTIONS)]


def read_envelope(value: object) -> Envelope:
    """Check an envelope. Never raises: a refused envelope or action says why, and names the good values."""
    try:
        raw = _RawEnvelope.model_validate(value)
    except ValidationError as error:
        return Envelope(
            _text(value, "message_id"),
            reason=f"the envelope is not valid ({_problems(error)}); it has the keys protocol_version, message_id and "
            f"actions, a list of up to {MAX_ACTIONS} with the keys action_id, action_type, action_version and payload",
        )
    if raw.protocol_version != PROTOCOL_VERSION:
        return Envelope(
            raw.message_id,
            reason=f"the protocol version {raw.protocol_version!r} is not supported; it must be {PROTOCOL_VERSION!r}",
        )
    return Envelope(raw.message_id, [_read_action(action) for action in raw.actions])


def _read_action(raw: _RawAction) -> Action:
    action = Action(raw.action_id, raw.action_type, None)
    payload_type = _PAYLOADS.get(raw.action_type) or _PAYLOADS.get(f"kv.{raw.action_type}")
    if payload_type is None:
        action.refuse(f"the action {raw.action_type!r} is unknown; good actions are: {GOOD_ACTIONS}")
        return action
    action.action_type = "kv." + raw.action_type.removeprefix("kv.")
    if raw.action_version != ACTION_VERSION:
        action.refuse(
            f"version {raw.action_version!r} of {action.action_type} is not supported; it must be {ACTION_VERSION!r}"
        )
        return action
    try:
        action.payload = payload_type.model_validate(raw.payload)
    except ValidationError as error:
        good = ", ".join(payload_type.model_fields)
        action.refuse(f"the payload of {action.action_type} is not valid ({_problems(error)}); its keys are: {good}")
    return action


def _problems(error: ValidationError) -> str:
    """Return the first problems as text, without long values."""
    problems = error.errors(include_url=False)
    parts = []
    for problem in problems[:3]:
        place = ".".join(map(str, problem["loc"])) or "value"
        parts.append(f"{place}: {repr(problem['input'])[:80]}: {problem['msg']}")
    return "; ".join(parts) + ("; and more" if len(problems) > len(parts) else "")


def _text(value: object, key: str) -> str:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found[:MAX_NAME_CHARACTERS] if isinstance(found, str) else ""
