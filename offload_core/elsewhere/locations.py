"""Finds the tier that has an object, for systems that ask about single keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from offload_core.api.keys import ObjectKey
from offload_core.tiers.tier import Tier


async def locate(tiers: Sequence[Tier], keys: Sequence[ObjectKey]) -> list[str | None]:
    """Return, per key, the name of a tier that has the object, or ``None``. Runs on the I/O loop.

    All tiers are asked at once. The highest ``load_weight`` wins, and of equals the first tier. A tier without an
    answer at its deadline has nothing. After one tier has found something, the others get their grace period only.
    """
    started = time.monotonic()
    asked = {asyncio.ensure_future(tier.lookup(keys)): tier for tier in tiers}
    deadline = {task: started + tier.limits.lookup_timeout_seconds for task, tier in asked.items()}
    answered: dict[str, list[bool]] = {}
    found_at: float | None = None
    waiting = set(asked)
    while waiting:
        now = time.monotonic()
        ends = {task: min(deadline[task], _end_of_grace(found_at, asked[task])) for task in waiting}
        waiting = {task for task, end in ends.items() if end > now}
        if not waiting:
            break
        seconds = min(ends[task] for task in waiting) - now
        done, waiting = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            present = answered[asked[task].name] = task.result()
            if found_at is None and any(present):
                found_at = time.monotonic()
    ranked = sorted((tier for tier in tiers if tier.name in answered), key=lambda tier: -tier.load_weight)
    return [next((tier.name for tier in ranked if answered[tier.name][place]), None) for place in range(len(keys))]


def _end_of_grace(found_at: float | None, tier: Tier) -> float:
    return float("inf") if found_at is None else found_at + tier.limits.lookup_grace_seconds
