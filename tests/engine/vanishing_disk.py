"""A disk backend whose folder is removed right after the first lookup that found something."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.backend import BackendType
from offload_core.hookspecs import hookimpl
from offload_core.keys import ObjectKey


class VanishingDisk(DiskBackend):
    """Removes its folder once, in the engine's own process, between lookup and load."""

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        present = await super().contains(keys)
        marker = self.options.path.with_name("vanished")
        if any(present) and not marker.exists():
            shutil.rmtree(self.options.path)
            marker.touch()
        return present


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("vanishing-disk", VanishingDisk, DiskOptions)]
