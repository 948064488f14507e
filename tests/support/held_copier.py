"""A copier whose copies go on after their calls, until the test lets them happen, as on the streams of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.payload_layout import PackLayout
from tests.support.transfer_rig import Rig, WholeCopier


class Stream:
    """Work that happens in its order, when the test says so."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._given = 0
        self._done = 0

    def give(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._given += 1

    def run(self, count: int | None = None) -> None:
        """Let the next ``count`` pieces of work happen, or all."""
        while self._work and count != 0:
            self._work.popleft()()
            self._done += 1
            count = None if count is None else count - 1

    @property
    def length(self) -> int:
        return len(self._work)

    def end(self) -> StreamPoint:
        return StreamPoint(self, self._given)

    def has_done(self, number: int) -> bool:
        return self._done >= number


class StreamPoint:
    def __init__(self, stream: Stream, number: int) -> None:
        self._stream = stream
        self._number = number

    def has_passed(self) -> bool:
        return self._stream.has_done(self._number)


class HeldCopier(WholeCopier):
    """Gathers read their blocks at once, as later work of the engine would follow them; the payload is filled later.

    Scatters read the payload and write the blocks later. Work of the engine, which the test does itself, happens at
    once. So a scatter that must come before it happens in :meth:`let_engine_follow_scatters`.

    Attributes:
        room: objects whose gathers may be on their way at once.
        is_held: whether copies wait for the test.
        orders_engine: whether the test's own work comes after the scatters when the transfer engine asks for that.
    """

    def __init__(self, caches: CanonicalKVCaches, room: int = 3) -> None:
        super().__init__(caches)
        self.room = room
        self.is_held = True
        self.orders_engine = True
        self.stores = Stream()
        self.loads = Stream()

    def has_room(self, payload_bytes: int) -> bool:
        return super().has_room(payload_bytes) and self.stores.length < self.room

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        if not self.has_room(len(payload)):
            return False
        copied = torch.empty_like(payload)
        if not super().gather(layout, blocks, copied):
            return False
        self.stores.give(lambda: payload.copy_(copied))
        self._flow()
        return True

    def gathers_end(self) -> StreamPoint:  # type: ignore[override]
        return self.stores.end()

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        scatter = super().scatter
        self.loads.give(lambda: scatter(layout, blocks, payload))
        self._flow()

    def scatters_end(self) -> StreamPoint:  # type: ignore[override]
        return self.loads.end()

    def let_engine_follow_scatters(self) -> None:
        if self.orders_engine:
            self.loads.run()

    def wait(self) -> None:
        self.stores.run()
        self.loads.run()

    def detach(self) -> None:
        self.wait()
        super().detach()

    def let_go(self) -> None:
        """Let all copies happen at once from now on."""
        self.is_held = False
        self.wait()

    def _flow(self) -> None:
        if not self.is_held:
            self.wait()


def copier(rig: Rig) -> HeldCopier:
    """Return the copier of a rig that was made with one of these."""
    assert isinstance(rig.copier, HeldCopier)
    return rig.copier
