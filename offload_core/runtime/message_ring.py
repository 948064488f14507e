"""A ring of messages in shared memory, from one writer to one reader.

The region has this layout. All numbers are unsigned, of eight bytes, in the machine's own byte order:

======  ============  ==========================================================
offset  bytes         content
======  ============  ==========================================================
0       8             magic number, with the version of this layout
8       8             capacity: the bytes for frames
128     8             write position, stored by the writer only
256     8             read position, stored by the reader only
384     the capacity  frames
======  ============  ==========================================================

A position counts bytes since the ring was made; its remainder by the capacity is an offset among the frames. The ring
is empty if the positions are equal, and full if they differ by the capacity. A frame begins at a multiple of eight
bytes and may continue at the beginning:

======  ============  ==========================================================
offset  bytes         content
======  ============  ==========================================================
0       8             length of the payload in bytes
8       8             sequence number: 0 for the first frame, then 1, 2, and so on
16      8             xxh3_64 of the payload, with the sequence number as its seed
24      the length    payload, then up to seven bytes of any value
======  ============  ==========================================================

Each side keeps its own position in private memory and publishes it by one aligned store of eight bytes, after the
frame's bytes. On processors that reorder stores, the reader may see a position before the frame. The checksum is wrong
until the frame is there, so the reader looks again later. The sequence number tells a frame from an older one at the
same place.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable

import xxhash

OVERHEAD_BYTES = 384
"""Bytes of the region that are not for frames."""

FRAME_OVERHEAD_BYTES = 24
"""Bytes of a frame before its payload."""

_MAGIC = int.from_bytes(b"offring\x01", "little")
_MAGIC_WORD, _CAPACITY_WORD, _WRITE_WORD, _READ_WORD = 0, 1, 16, 32
_LINE_BYTES = 128  # a pair of cache lines of 64 bytes, since processors fetch them together, or one line of 128
_ALIGN = 8
_ROUND_UP = FRAME_OVERHEAD_BYTES + _ALIGN - 1

# Native formats: a store of eight bytes is one store then, and not eight of one byte.
_header = struct.Struct("@QQQ")
_pack, _unpack, _unpack_from = _header.pack, _header.unpack, _header.unpack_from
_checksum = xxhash.xxh3_64_intdigest


class RingError(Exception):
    """The shared region contains impossible values, so the peer has failed. Do not use the ring again."""


def format_ring(region: memoryview) -> None:
    """Make an empty ring. Call this once, before the first :class:`RingWriter` and :class:`RingReader`.

    Args:
        region: writable memory that begins at a multiple of 128 bytes, with room for at least one empty frame.

    Raises:
        ValueError: the region is read-only, too small or not aligned.
    """
    words, _, capacity = _parts(region)
    words[_WRITE_WORD] = words[_READ_WORD] = 0
    words[_CAPACITY_WORD] = capacity
    words[_MAGIC_WORD] = _MAGIC


class _RingEnd:
    """One end of a ring.

    Args:
        own_word: the place of this end's position.
    """

    def __init__(self, region: memoryview, own_word: int) -> None:
        self._words, self._data, self._capacity = _attach(region, own_word)
        self._position = 0
        self._sequence = 0

    def close(self) -> None:
        """Give the region up. Harmless when repeated; every other method raises ``ValueError`` afterwards."""
        self._words.release()
        self._data.release()

    @property
    def capacity_bytes(self) -> int:
        """Bytes for frames: a frame takes its payload, :data:`FRAME_OVERHEAD_BYTES`, and up to 7 bytes of padding."""
        return self._capacity

    @property
    def max_payload_bytes(self) -> int:
        """Size of the largest payload."""
        return self._capacity - FRAME_OVERHEAD_BYTES


class RingWriter(_RingEnd):
    """The writing end of a ring. There is one in a ring's life; it is for one thread at a time.

    Args:
        region: memory that :func:`format_ring` has prepared, here or in another process.

    Raises:
        RingError: the region contains no ring of this version and size, or one that has had a writer.
        ValueError: the region is read-only, too small or not aligned.
    """

    def __init__(self, region: memoryview) -> None:
        super().__init__(region, _WRITE_WORD)
        self._limit = self._capacity  # the last read position that was seen, plus the capacity

    def try_write(self, payload: bytes | bytearray | memoryview) -> bool:
        """Write one frame, or return ``False`` if there is no room for it now. Never waits.

        Raises:
            RingError: the reader's position is impossible.
            ValueError: the payload is larger than :attr:`max_payload_bytes`.
        """
        if type(payload) is not bytes:
            payload = bytes(payload)  # so that nobody changes it after the checksum
        nbytes = len(payload)
        position = self._position
        end = position + (nbytes + _ROUND_UP & -_ALIGN)
        if end > self._limit and not self._has_room(end, nbytes):
            return False
        sequence = self._sequence
        frame = _pack(nbytes, sequence, _checksum(payload, sequence)) + payload
        offset = position % self._capacity
        stop = offset + len(frame)
        if stop <= self._capacity:
            self._data[offset:stop] = frame
        else:
            split = self._capacity - offset
            self._data[offset:] = frame[:split]
            self._data[: stop - self._capacity] = frame[split:]
        self._position = end
        self._sequence = sequence + 1
        self._words[_WRITE_WORD] = end
        return True

    def _has_room(self, end: int, nbytes: int) -> bool:
        if nbytes > self.max_payload_bytes:
            raise ValueError(f"a message of {nbytes} bytes does not fit; the ring takes {self.max_payload_bytes} bytes")
        read = self._words[_READ_WORD]
        first = self._limit - self._capacity
        if not first <= read <= self._position or read % _ALIGN:
            raise RingError(
                f"the read position is {read}; it must be a multiple of {_ALIGN} from {first} to {self._position}"
            )
        self._limit = read + self._capacity
        return end <= self._limit


class RingReader(_RingEnd):
    """The reading end of a ring. There is one in a ring's life; it is for one thread at a time.

    Args:
        region: memory that :func:`format_ring` has prepared, here or in another process.
        patience_seconds: time for a damaged frame to become whole, see :meth:`read`.
        clock: seconds that never go back.

    Raises:
        RingError: the region contains no ring of this version and size, or one that has had a reader.
        ValueError: the region is read-only, too small or not aligned.
    """

    def __init__(
        self, region: memoryview, patience_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(region, _READ_WORD)
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._limit = 0  # the last write position that was seen
        self._damaged_since: float | None = None

    def read(self) -> bytes | None:
        """Return the payload of the next frame, or ``None`` if it is not there yet. Never waits.

        A frame with an impossible length, sequence number or checksum counts as not there yet for the reader's
        patience. A reader that waits for a doorbell must call this now and then, or damage stays unnoticed.

        Raises:
            RingError: the writer's position is impossible, or the frame is still damaged after the patience.
        """
        position = self._position
        limit = self._limit
        if position == limit:
            limit = self._words[_WRITE_WORD]
            if limit == position:
                return None
            self._check(limit)
            self._limit = limit
        offset = position % self._capacity
        begin = offset + FRAME_OVERHEAD_BYTES
        if begin <= self._capacity:
            nbytes, sequence, checksum = _unpack_from(self._data, offset)
        else:
            nbytes, sequence, checksum = _unpack(self._copy(offset, FRAME_OVERHEAD_BYTES))
        if nbytes > limit - position - FRAME_OVERHEAD_BYTES:
            self._check_patience(f"length is {nbytes} bytes")
            return None
        stop = begin + nbytes
        # The payload is copied first and checked then: the peer cannot change it between the two.
        payload = self._data[begin:stop].tobytes() if stop <= self._capacity else self._copy(begin, nbytes)
        if sequence != self._sequence:
            self._check_patience(f"sequence number is {sequence}")
            return None
        if _checksum(payload, sequence) != checksum:
            self._check_patience(f"checksum {checksum:#x} is wrong")
            return None
        self._damaged_since = None
        self._sequence = sequence + 1
        self._position = position = position + (nbytes + _ROUND_UP & -_ALIGN)
        self._words[_READ_WORD] = position
        return payload

    def _check(self, limit: int) -> None:
        last = self._position + self._capacity
        if not self._position <= limit <= last or limit % _ALIGN:
            raise RingError(
                f"the write position is {limit}; it must be a multiple of {_ALIGN} from {self._position} to {last}"
            )

    def _copy(self, begin: int, nbytes: int) -> bytes:
        begin %= self._capacity
        stop = begin + nbytes
        if stop <= self._capacity:
            return self._data[begin:stop].tobytes()
        return self._data[begin:].tobytes() + self._data[: stop - self._capacity].tobytes()

    def _check_patience(self, damage: str) -> None:
        now = self._clock()
        if self._damaged_since is None:
            self._damaged_since = now
        elif now - self._damaged_since >= self._patience_seconds:
            raise RingError(
                f"the {damage} in frame {self._sequence} at position {self._position}, for"
                f" {now - self._damaged_since:.1f} s; the write position is {self._limit}"
            )


def _attach(region: memoryview, own_word: int) -> tuple[memoryview, memoryview, int]:
    """Return the words and the frames of a ring whose own side is unused."""
    words, data, capacity = _parts(region)
    if words[_MAGIC_WORD] != _MAGIC:
        raise RingError(f"the region begins with {words[_MAGIC_WORD]:#x}, and a ring with {_MAGIC:#x}")
    if words[_CAPACITY_WORD] != capacity:
        raise RingError(f"the ring is for {words[_CAPACITY_WORD]} bytes of frames, and the region for {capacity}")
    if words[own_word]:
        side = "writer" if own_word == _WRITE_WORD else "reader"
        raise RingError(f"the ring has had a {side}, up to position {words[own_word]}; format it again for both sides")
    return words, data, capacity


def _parts(region: memoryview) -> tuple[memoryview, memoryview, int]:
    """Return the words before the frames, the frames, and their capacity in bytes."""
    if region.readonly:
        raise ValueError("the region of a ring must be writable")
    if region.nbytes < OVERHEAD_BYTES + FRAME_OVERHEAD_BYTES:
        raise ValueError(
            f"a region of {region.nbytes} bytes is too small for a ring; the smallest has"
            f" {OVERHEAD_BYTES + FRAME_OVERHEAD_BYTES}"
        )
    region = region.cast("B")
    if ctypes.addressof(ctypes.c_char.from_buffer(region)) % _LINE_BYTES:
        raise ValueError(f"the region of a ring must begin at a multiple of {_LINE_BYTES} bytes")
    capacity = (region.nbytes - OVERHEAD_BYTES) // _ALIGN * _ALIGN
    return region[:OVERHEAD_BYTES].cast("Q"), region[OVERHEAD_BYTES : OVERHEAD_BYTES + capacity], capacity
