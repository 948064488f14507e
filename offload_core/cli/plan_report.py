"""The objects and bytes of a plan: the numbers behind ``offload-core plan``.

The counts come from questions to the planner about every unit of a long prompt, as in the engine, and not from a
formula. The prompt has at least 100,000 tokens, rounded up to whole periods of the plan. ``max_model_len`` limits it. A
value per 1,000 tokens is the count divided by the length of the prompt.

For a recurrent group, every boundary counts. The engine provides a state only at the end of one of its steps. A prompt
that it computes in long steps therefore has fewer of these objects, and never more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload_core.config.geometry_file import KVCacheGeometry, policy_text
from offload_core.objects.format import object_bytes
from offload_core.planning.chunk_size import ChunkSizes
from offload_core.planning.packs import Pack
from offload_core.planning.planner import HybridOffloadPlanner

_PROMPT_TOKENS = 100_000


@dataclass(frozen=True)
class GroupReport:
    """One group: its unit of tokens, and the pack of its blocks."""

    index: int
    name: str
    policy: str
    block_size_tokens: int
    block_bytes: int
    """Bytes of one block on one rank, in all layers."""
    unit_tokens: int
    hash_factor: int
    """Number of the engine's block hashes per unit."""
    pack: str | None
    """Name of the group's pack; ``None`` if no boundary needs the group, so that it has no objects."""
    blocks_per_object: int


@dataclass(frozen=True)
class PackReport:
    """One pack: its objects and their sizes."""

    name: str
    groups: tuple[int, ...]
    unit_tokens: int
    payload_bytes: int
    """Bytes of one object, which belongs to one rank."""
    object_bytes: int
    """Bytes of one object with its header."""
    objects_per_1000_tokens: float
    """Objects of all ranks."""
    bytes_per_1000_tokens: float
    """Bytes of all ranks, headers included."""


@dataclass(frozen=True)
class PlanReport:
    """The plan for one chunk size."""

    hybrid_chunk_size: int
    default_hybrid_chunk_size: int | None
    """The engine's own choice; ``None`` if no chunk size works."""
    hash_block_size_tokens: int
    boundary_tokens: int
    """Every loaded prefix has a multiple of this many tokens."""
    shortest_served_prompt_tokens: int
    """A shorter prompt is always computed: it has no boundary before its last token, or no name for its objects."""
    prompt_tokens: int
    """Length of the prompt behind the numbers per 1,000 tokens."""
    ranks: int
    groups: tuple[GroupReport, ...]
    packs: tuple[PackReport, ...]
    objects_per_1000_tokens: float
    bytes_per_1000_tokens: float
    tail_objects: int
    """Further objects of all ranks for a prompt that ends inside a chunk; 0 without tails."""
    tail_bytes: int
    """Bytes of these objects, headers included."""
    warnings: tuple[str, ...]


def plan_report(
    geometry: KVCacheGeometry, hybrid_chunk_size: int | None, prompt_tokens: int = _PROMPT_TOKENS
) -> PlanReport:
    """Plan for ``hybrid_chunk_size`` (``None``: the default) and count over at least ``prompt_tokens`` tokens.

    Raises:
        PlanError: the engine would refuse this chunk size. The message has the reason and a working size.
    """
    planner = geometry.planner(hybrid_chunk_size)
    tokens = _counted_tokens(planner, prompt_tokens)
    packs = tuple(_pack_report(planner, pack, geometry, tokens) for pack in planner.packs)
    return PlanReport(
        hybrid_chunk_size=planner.hybrid_chunk_size,
        default_hybrid_chunk_size=ChunkSizes(planner.groups, planner.max_model_len).default,
        hash_block_size_tokens=planner.hash_block_size,
        boundary_tokens=planner.boundary_tokens,
        shortest_served_prompt_tokens=(planner.hash_block_size if planner.tail_packs else planner.boundary_tokens)
        + max(1, planner.lookahead_blocks * planner.hash_block_size),
        prompt_tokens=tokens,
        ranks=geometry.ranks,
        groups=_group_reports(planner, geometry),
        packs=packs,
        objects_per_1000_tokens=sum(pack.objects_per_1000_tokens for pack in packs),
        bytes_per_1000_tokens=sum(pack.bytes_per_1000_tokens for pack in packs),
        tail_objects=geometry.ranks * len(planner.tail_packs),
        tail_bytes=geometry.ranks * sum(object_bytes(geometry.payload_bytes(pack)) for pack in planner.tail_packs),
        warnings=planner.warnings,
    )


def _counted_tokens(planner: HybridOffloadPlanner, at_least: int) -> int:
    """Return a prompt length of whole periods of the plan, limited by ``max_model_len``."""
    chunked = [g.policy.attention_chunk_tokens for g in planner.groups if g.policy.kind == "chunked"]
    period = math.lcm(planner.boundary_tokens, *chunked)
    return min(-(-at_least // period) * period, planner.storable_prefix(planner.max_model_len))


def _pack_report(planner: HybridOffloadPlanner, pack: Pack, geometry: KVCacheGeometry, tokens: int) -> PackReport:
    payload = geometry.payload_bytes(pack)
    objects = geometry.ranks * sum(planner.ever_needed(pack, unit) for unit in range(pack.units_in(tokens)))
    return PackReport(
        name=pack.name,
        groups=tuple(group.index for group in pack.groups),
        unit_tokens=pack.unit_tokens,
        payload_bytes=payload,
        object_bytes=object_bytes(payload),
        objects_per_1000_tokens=objects * 1000 / tokens,
        bytes_per_1000_tokens=objects * object_bytes(payload) * 1000 / tokens,
    )


def _group_reports(planner: HybridOffloadPlanner, geometry: KVCacheGeometry) -> tuple[GroupReport, ...]:
    pack_of = {group.index: (pack, pack.stored_blocks(group)) for pack in planner.packs for group in pack.groups}
    reports: list[GroupReport] = []
    for index, group in geometry.indexed_groups():
        pack, blocks = pack_of.get(index, (None, 0))
        factor = planner.group_hash_factors[index]
        reports.append(
            GroupReport(
                index=index,
                name=group.name,
                policy=policy_text(group.policy),
                block_size_tokens=group.block_size_tokens,
                block_bytes=group.block_bytes,
                unit_tokens=factor * planner.hash_block_size,
                hash_factor=factor,
                pack=pack.name if pack is not None else None,
                blocks_per_object=blocks,
            )
        )
    return tuple(reports)
