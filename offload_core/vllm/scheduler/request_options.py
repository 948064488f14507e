"""The options that a request may set for itself."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

REQUEST_KEY = "hybrid_offload"


class RequestOptions(BaseModel):
    """A request's own options: the ``hybrid_offload`` key of its ``kv_transfer_params``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    load: bool = Field(default=True, description="load this request's prefix from the tiers")
    store: bool = Field(default=True, description="store this request's chunks on the tiers")
    max_load_tokens: int | None = Field(default=None, ge=0, description="most tokens of one load; none: no limit")
    tiers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="the only tiers to look up and to load from; none: all"
    )
    hints: Any = Field(default=None, description="an envelope of KV hints; their answer says whether it is valid")

    @field_validator("tiers")
    @classmethod
    def _are_known(cls, tiers: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if info.context is not None and (unknown := set(tiers or ()) - set(info.context)):
            raise ValueError(f"no tier has the name {', '.join(map(repr, sorted(unknown)))}")
        return tiers

    @classmethod
    def of(cls, request: Request, tier_names: Collection[str]) -> RequestOptions:
        """Return a request's options. Invalid ones are logged and exclude loads and stores, the safe choice.

        Args:
            tier_names: the names of the engine's tiers.
        """
        params = request.kv_transfer_params
        if not params or REQUEST_KEY not in params:
            return _DEFAULT_OPTIONS
        try:
            return cls.model_validate(params[REQUEST_KEY], context=tier_names)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or REQUEST_KEY}: {problem['input']!r}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
            logger.warning(
                "request %s: kv_transfer_params[%r] is not valid (%s); nothing is loaded or stored for it. "
                'Valid keys are "load" and "store", each true or false; "max_load_tokens", a whole number from 0 on; '
                'and "tiers", a list of one or more of these names: %s.',
                request.request_id, REQUEST_KEY, problems, ", ".join(map(repr, tier_names)),
            )  # fmt: skip
            return cls(load=False, store=False)

    def within(self, engine: RequestOptions) -> RequestOptions:
        """Return these options without the loads and stores that the engine does not make."""
        return self.model_copy(update={"load": self.load and engine.load, "store": self.store and engine.store})

    @property
    def limits_loads(self) -> bool:
        """True if a lookup for the request may find less than the tiers have."""
        return self.max_load_tokens is not None or self.tiers is not None


_DEFAULT_OPTIONS = RequestOptions()
