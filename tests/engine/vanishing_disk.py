"""A disk backend whose folder is emptied right before the first load."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import BackendType, LoadReservation
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey

OFFLOAD_API_VERSION = 1


class VanishingDisk(DiskBackend):
    """Empties its folder once, in the engine's own process, between lookup and load."""

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        marker = self.options.path.with_name("vanished")
        if not marker.exists():
            for folder in self.options.path.iterdir():
                shutil.rmtree(folder)
            marker.touch()
        return await super().prepare_load(keys)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("vanishing-disk", VanishingDisk, DiskOptions)]
