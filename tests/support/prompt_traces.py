"""Small traces, made from prompts that are sequences of tokens."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from offload_core.simulation.trace import FORMAT, VERSION, Request, Trace

Tokens = tuple[int, ...]


def trace_of(prompts: Iterable[Tokens], block_tokens: int) -> Trace:
    """Return a trace in which every block has an id, also the last one that is not whole."""
    ids: dict[Tokens, int] = {}
    requests = [
        Request(
            len(prompt),
            tuple(
                ids.setdefault(prompt[: start + block_tokens], len(ids))
                for start in range(0, len(prompt), block_tokens)
            ),
        )
        for prompt in prompts
    ]
    return Trace(block_tokens, requests)


def conversations(count: int, turns: int, turn_tokens: int, seed: int = 0) -> list[Tokens]:
    """Return the prompts of conversations that take turns in random order. All begin with the same turn.

    Each prompt is the one before it of the same conversation with one more turn of half to one and a half
    ``turn_tokens``.
    """
    chance = random.Random(seed)
    system_prompt = tuple(range(turn_tokens))
    prompts = dict.fromkeys(range(count), system_prompt)
    order = [number for number in prompts for _ in range(turns)]
    chance.shuffle(order)
    made: list[Tokens] = []
    for number in order:
        added = chance.randint(turn_tokens // 2, turn_tokens * 3 // 2)
        prompts[number] += tuple(chance.randrange(1 << 30) for _ in range(added))
        made.append(prompts[number])
    return made


def write_trace(path: Path, trace: Trace, *, header: bool = True) -> Path:
    """Write a trace with or without a header, compressed if the path ends in ``.gz``."""
    lines: list[object] = [{"format": FORMAT, "version": VERSION, "block_tokens": trace.block_tokens}] if header else []
    lines += [
        {"timestamp": 1000 * number, "input_length": tokens, "output_length": 1, "hash_ids": list(ids)}
        for number, (tokens, ids) in enumerate(trace.requests)
    ]
    return write_lines(path, [json.dumps(line) for line in lines])


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """Write a file of lines, compressed if the path ends in ``.gz``."""
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
