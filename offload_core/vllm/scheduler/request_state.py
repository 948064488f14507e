"""What the scheduler half keeps of each request, and what a request may ask for itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload_core.lookup.service import Lookup
from offload_core.lookup.waiting_time import WaitingTime
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner, Pack
from offload_core.vllm.model.lora import Adapter

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

REQUEST_KEY = "hybrid_offload"


class RequestOptions(BaseModel):
    """A request's own wishes: the ``hybrid_offload`` key of its ``kv_transfer_params``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    load: bool = Field(default=True, description="use what is on the tiers for this request")
    store: bool = Field(default=True, description="put this request's tokens on the tiers")

    @classmethod
    def of(cls, request: Request) -> RequestOptions:
        """Read a request's options. What cannot be read opts out of both, with a warning: that is the safe reading."""
        params = request.kv_transfer_params
        if not params or REQUEST_KEY not in params:
            return _EVERYTHING
        try:
            return cls.model_validate(params[REQUEST_KEY])
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or REQUEST_KEY}: {problem['input']!r}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
            logger.warning(
                "request %s: kv_transfer_params[%r] is not valid (%s); nothing is loaded or stored for it. "
                'Valid keys are "load" and "store", each true or false.',
                request.request_id, REQUEST_KEY, problems,
            )  # fmt: skip
            return cls(load=False, store=False)


_EVERYTHING = RequestOptions()


@dataclass(frozen=True)
class Offer:
    """What was offered to the engine: a prefix up to ``boundary_tokens``, from ``tier``."""

    computed_tokens: int
    boundary_tokens: int
    tier: str
    expires: float


@dataclass
class RequestState:
    """One request that the scheduler half follows."""

    request: Request
    options: RequestOptions
    adapter: Adapter | None
    """The LoRA adapter; ``None`` for the model itself."""
    next_unit: dict[str, int]
    """Per pack name, the first unit that has not been looked at for storing."""
    next_store_tokens: int = 0
    """No unit is complete below this token count that has not been looked at."""
    lookup: Lookup | None = None
    offer: Offer | None = None
    job_id: int | None = None
    loading: Sequence[ChunkRef] = field(default=())
    wait: WaitingTime = field(default_factory=WaitingTime)
    """How long it has waited for lookups, and for loads: others' of the same chunks, and its own."""
    not_loaded: set[tuple[str, ChunkRef]] = field(default_factory=set)
    """Names of tiers, and chunks that its own loads from there did not get: not offered to it again."""
    uses_part: bool = False
    """Some rank's load has ended early, and the engine uses what it got."""
    failed_once: bool = False
    """A load has failed, or got only a part; one more may be tried."""
    offers_left: int = 0
    """After a failed load: how often another is offered to the engine, which may find no room for it."""

    def ref(self, pack: Pack, unit: int) -> ChunkRef:
        """Name a unit of this request."""
        chunk_hash = self.request.block_hashes[pack.hash_index(unit)]
        return ChunkRef(pack.name, chunk_hash, self.adapter.digest if self.adapter else "")

    def all_refs(self, planner: HybridOffloadPlanner) -> list[ChunkRef]:
        """Name every chunk of this request whose hash is known."""
        hashed = len(self.request.block_hashes)
        return [self.ref(pack, unit) for pack in planner.packs for unit in range(hashed // pack.hash_factor)]

    def needed_refs(self, planner: HybridOffloadPlanner, computed_tokens: int, boundary_tokens: int) -> list[ChunkRef]:
        """Name every chunk that a load from ``computed_tokens`` to ``boundary_tokens`` takes."""
        return [
            self.ref(pack, unit)
            for pack in planner.packs
            for unit in pack.needed_units(computed_tokens, boundary_tokens)
        ]
