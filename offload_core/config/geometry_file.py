"""A model's KV cache as a file. ``offload-core plan`` reads it; an engine writes it to its ``geometry_file``.

YAML, TOML or JSON; :class:`KVCacheGeometry` is the schema. ``examples/geometries`` has one file per kind of model. The
two groups of a model with a sliding window of 128 tokens in half of its 24 layers::

    hash_block_size_tokens: 16
    max_model_len: 131072
    groups:
      - {block_size_tokens: 16, policy: full, pages: [{count: 12, page_bytes: 32768}]}
      - {block_size_tokens: 16, policy: window 128, pages: [{count: 12, page_bytes: 32768}]}
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from offload_core.api.errors import ConfigError
from offload_core.config.file import read_keys
from offload_core.config.problems import validate
from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.packs import GroupGeometry, Pack
from offload_core.planning.planner import HybridOffloadPlanner

_POLICY = "full|state|(window|chunked) [1-9][0-9]*"


def _policy(written: object) -> HitPolicy:
    if isinstance(written, HitPolicy):
        return written
    if not isinstance(written, str) or not re.fullmatch(_POLICY, written):
        raise ValueError("write full, state, window N or chunked N with N in tokens, for example window 1024")
    kind, _, tokens = written.partition(" ")
    if kind == "window":
        return HitPolicy("window", window_tokens=int(tokens))
    if kind == "chunked":
        return HitPolicy("chunked", attention_chunk_tokens=int(tokens))
    return HitPolicy("full" if kind == "full" else "state")


def policy_text(policy: HitPolicy) -> str:
    """Return ``policy`` as text in a geometry file: ``full``, ``state``, ``window N`` or ``chunked N``."""
    tokens = {"window": f" {policy.window_tokens}", "chunked": f" {policy.attention_chunk_tokens}"}
    return policy.kind + tokens.get(policy.kind, "")


Count = Annotated[int, Field(ge=1, strict=True)]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BlockPages(_Keys):
    """Pages of one size in a block."""

    count: Annotated[
        Count, Field(description="Pages per block: one per layer, or two if keys and values are separate.")
    ]
    page_bytes: Annotated[Count, Field(description="Bytes of data in each page on one rank, without padding.")]


class KVCacheGroup(_Keys):
    """Layers that share one block table."""

    index: Annotated[
        int | None,
        Field(ge=0, strict=True, description="The engine's number of the group. If unset, its place in the list."),
    ] = None
    name: Annotated[str, Field(description="A name for people; not used.")] = ""
    block_size_tokens: Annotated[Count, Field(description="Tokens per block.")]
    policy: Annotated[
        HitPolicy,
        BeforeValidator(_policy),
        PlainSerializer(policy_text),
        WithJsonSchema({"type": "string", "pattern": f"^({_POLICY})$"}),
        Field(
            description="Part of the group that a hit needs: full (every token), window N (sliding window of N "
            "tokens), chunked N (attention chunk of N tokens) or state (one recurrent state)."
        ),
    ]
    pages: Annotated[list[BlockPages], Field(min_length=1, description="The pages of one block.")]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group, on one rank."""
        return sum(pages.count * pages.page_bytes for pages in self.pages)


class KVCacheGeometry(_Keys):
    """The groups of a model that take part in prefix caching, and the other inputs of the plan."""

    model: Annotated[str, Field(description="A name for people; not used.")] = ""
    hash_block_size_tokens: Annotated[Count, Field(description="Tokens per block hash of the engine.")]
    scheduler_block_size_tokens: Annotated[
        Count,
        Field(description="The engine resumes at multiples of this only. It matters if the engine has other groups."),
    ] = 1
    max_model_len: Annotated[Count, Field(description="Longest sequence in tokens.")] = 1 << 20
    hybrid_chunk_size: Annotated[
        Count | None, Field(description="Tokens per stored chunk. If unset, the block sizes decide.")
    ] = None
    lookahead_tokens: Annotated[
        int,
        Field(
            ge=0,
            strict=True,
            description="Further tokens on which the cache at a position depends: 1 if drafts of the EAGLE kind have "
            "groups of their own.",
        ),
    ] = 0
    tails: Annotated[
        bool,
        Field(
            strict=True,
            description="Store the end of each prompt inside a chunk too, as an engine with --prefix-match-unit does.",
        ),
    ] = False
    ranks: Annotated[Count, Field(description="Workers of the engine. Each stores its own objects.")] = 1
    groups: Annotated[list[KVCacheGroup], Field(min_length=1, description="The groups, in the engine's order.")]

    def indexed_groups(self) -> list[tuple[int, KVCacheGroup]]:
        """Return each group with its index."""
        return [(place if group.index is None else group.index, group) for place, group in enumerate(self.groups)]

    def payload_bytes(self, pack: Pack) -> int:
        """Return the bytes of one object of ``pack`` on one rank, without its header."""
        block_bytes = {index: group.block_bytes for index, group in self.indexed_groups()}
        return sum(pack.stored_blocks(group) * block_bytes[group.index] for group in pack.groups)

    def planner(self, hybrid_chunk_size: int | None) -> HybridOffloadPlanner:
        """Return the engine's plan for ``hybrid_chunk_size``; ``None`` is its default.

        Raises:
            PlanError: the engine would refuse to start; the message has the reason.
        """
        return HybridOffloadPlanner.build(
            [GroupGeometry(index, g.block_size_tokens, g.policy) for index, g in self.indexed_groups()],
            hash_block_size=self.hash_block_size_tokens,
            max_model_len=self.max_model_len,
            hybrid_chunk_size=hybrid_chunk_size,
            scheduler_block_size=self.scheduler_block_size_tokens,
            lookahead_tokens=self.lookahead_tokens,
            tail_tokens=self.hash_block_size_tokens if self.tails else None,
        )


def load_geometry(path: Path) -> KVCacheGeometry:
    """Read a geometry file.

    Raises:
        ConfigError: with every problem: the dotted path, the bad value, valid values, the cure.
    """
    source = f"{path} (geometry)"
    geometry, problems = validate(KVCacheGeometry, read_keys(path, "geometry", source), prefix="")
    if geometry is not None:
        groups = geometry.indexed_groups()
        uses = Counter(index for index, _ in groups)
        problems += [
            f"groups.{place}.index: {index} is used by {uses[index]} groups; give each an index of its own, or none any"
            for place, (index, _) in enumerate(groups)
            if uses[index] > 1
        ]
    if geometry is None or problems:
        raise ConfigError(problems, source)
    return geometry


def save_geometry(geometry: KVCacheGeometry, path: Path) -> None:
    """Write a geometry file as JSON, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(geometry.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
