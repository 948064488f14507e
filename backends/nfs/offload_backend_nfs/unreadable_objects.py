"""Objects that the storage cannot read although it can read others. They count as damaged, so they are stored anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload_backend_nfs.recent_keys import drop_oldest, remember
from offload_backend_nfs.storage.failures import UnreadableObjectError
from offload_core.api import LoadOutcome, ObjectKey, TierLogger

_MAX_KEYS = 1000


class UnreadableObjects:
    """The unreadable objects that this process has found, the latest ones. Only ``in`` may be used on any thread."""

    def __init__(self, log: TierLogger) -> None:
        self._log = log
        self._keys: dict[ObjectKey, None] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._keys

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Forget objects that were deleted or could be read."""
        for key in keys:
            self._keys.pop(key, None)

    def outcomes(
        self, keys: Sequence[ObjectKey], results: Sequence[LoadOutcome | UnreadableObjectError]
    ) -> list[LoadOutcome]:
        """Return the outcomes of the loads of one batch.

        If the storage cannot read one object, but can read another one of the batch, the object is corrupt. It stays so
        when it is read again alone. Otherwise the storage has failed.

        Raises:
            UnreadableObjectError: the storage has failed.
        """
        found = dict(zip(keys, results, strict=True))
        new = {
            key: result
            for key, result in found.items()
            if isinstance(result, UnreadableObjectError) and key not in self._keys
        }
        uncertain = [error for error in new.values() if not error.is_certain]
        if len(uncertain) > 1 or (uncertain and LoadOutcome.HIT not in results):
            raise uncertain[0]
        self.forget(key for key, result in found.items() if result is LoadOutcome.HIT)
        remember(self._keys, new, None)
        drop_oldest(self._keys, _MAX_KEYS)
        if new:
            key, error = next(iter(new.items()))
            self._log.warning(
                "%d objects cannot be read, and count as damaged, among them %s: %s", len(new), key.path, error
            )
        return [LoadOutcome.CORRUPT if isinstance(result, UnreadableObjectError) else result for result in results]
