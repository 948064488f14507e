"""The expected content of the stand-in's KV cache: bytes that are a pure function of layer, rank and prefix.

The hash of an empty prefix depends on the salt and the version of the weights. So bytes of another salt or of old
weights are wrong bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005
_GOLDEN = 0x9E3779B97F4A7C15
POISON = 0xDB
"""Every byte of a block that has been allocated and not written yet."""
ASLEEP = 0xA5
"""Every byte of a KV cache whose memory is gone while the engine sleeps; nobody may read or write it."""


class Prefix:
    """A request's tokens and the running hash over them.

    Args:
        prompt: token ids of the prompt.
        seed: salt and version of the weights; the bytes depend on them and on the tokens.
        vocab_size: the end of the range of sampled tokens.
        first_token: the begin of the range of sampled tokens.
    """

    def __init__(self, prompt: Sequence[int], seed: str, vocab_size: int, first_token: int) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self._vocab_size = vocab_size
        self._first_token = first_token
        self._hashes: list[int] = []
        self.reseed(seed)

    def reseed(self, seed: str) -> None:
        """Set another seed: all bytes computed from now on differ."""
        self._hashes = [_mix(zlib.crc32(seed.encode()) + 1)]

    def hash_at(self, tokens: int) -> int:
        """Return the hash of the first ``tokens`` tokens."""
        for position in range(len(self._hashes) - 1, tokens):
            self._hashes.append(_mix(self._hashes[position] * _MULTIPLIER + self.tokens[position] + 1))
        return self._hashes[tokens]

    def hashes(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the hashes of the prefixes that end at ``ends`` (token counts)."""
        if len(ends):
            self.hash_at(int(ends[-1]))
        return np.array([self._hashes[end] for end in ends.tolist()], dtype=np.uint64)

    def sample(self, tokens: int) -> int:
        """Return the token that follows the first ``tokens`` tokens, for any seed, and keep it."""
        if tokens == len(self.tokens):
            digest = zlib.crc32(repr([*self.tokens[-8:], tokens]).encode())
            self.tokens.append(self._first_token + digest % (self._vocab_size - self._first_token))
        return self.tokens[tokens]


def layer_seed(layer: str, rank: int) -> int:
    """Return the seed that makes one layer's bytes on one rank differ from all others."""
    return _mix(zlib.crc32(f"{layer}/{rank}".encode()))


def content(hashes: npt.NDArray[np.uint64], seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` bytes for each prefix hash, shape ``(len(hashes), nbytes)``."""
    words = -(-nbytes // 8)
    steps = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    mixed = (hashes[:, None] ^ np.uint64(seed)) + steps[None, :]
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(_MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    return mixed.view(np.uint8)[:, :nbytes]


def _mix(value: int) -> int:
    value &= _MASK
    value ^= value >> 31
    value = value * _GOLDEN & _MASK
    return value ^ value >> 29
