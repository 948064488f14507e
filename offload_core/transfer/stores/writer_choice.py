"""The choice of the tiers that store an object: write policies, circuit breakers and shares decide."""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.api.keys import ObjectKey
from offload_core.runtime.metrics import Counters
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.stores.tier_writer import TierWriter


class WriterChoice:
    """Chooses among the tiers' writers. For the engine thread.

    Args:
        writers: the fastest tier's first.
    """

    def __init__(self, writers: Sequence[TierWriter], counters: Counters) -> None:
        self._writers = writers
        self._counters = counters
        self._positions = {writer.name: position for position, writer in enumerate(writers)}

    def for_offered(self, item: TransferObject, busy: bool) -> list[TierWriter]:
        """Return the writers of the tiers that take an offered store."""
        writers = []
        for writer in self._writers:
            if not writer.policy.takes_offered(item.key):
                self._counters.add("store_declined", writer.name)
            elif item.spare and not writer.takes_spare(busy):
                self._counters.add("spares_declined", writer.name)
            else:
                writers.append(writer)
        return writers

    def for_loaded(self, key: ObjectKey, source: str) -> list[TierWriter]:
        """Return the writers of the tiers that take an object loaded from ``source``."""
        from_position = self._positions[source]
        writers = []
        for position, writer in enumerate(self._writers):
            if position == from_position:
                continue
            faster = position < from_position
            wanted = writer.policy.takes_loaded(key, promoted=faster)  # counts as a use in any case
            if wanted and (writer.tier.config.promote or not faster):
                writers.append(writer)
        return writers

    def charge(self, writers: Sequence[TierWriter], nbytes: int, counter: str, *, may_drop: bool) -> list[TierWriter]:
        """Charge each healthy tier with enough space in its share, and return their writers; count the others."""
        charged = []
        for writer in writers:
            if writer.admits() and writer.charge(nbytes, may_drop=may_drop):
                charged.append(writer)
            else:
                self._counters.add(counter, writer.name)
        return charged

    def discharge(self, writers: Sequence[TierWriter], nbytes: int, counter: str) -> None:
        """Undo :meth:`charge` for an object that is dropped, and count it."""
        for writer in writers:
            writer.discharge(nbytes)
        self.count(writers, counter)

    def count(self, writers: Sequence[TierWriter], counter: str) -> None:
        """Count an object at some tiers."""
        for writer in writers:
            self._counters.add(counter, writer.name)
