"""The ``disk`` backend.

An object lies at ``path/namespace/pack/ab/abcdef….kv``, where ``ab`` are the first two digits of its chunk hash, so
that no folder grows beyond a 256th of a pack. Folders have mode 0700 and files 0600: a KV cache holds users' text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from aiofiles.base import wrap
from pydantic import Field, field_validator

from offload_backend_disk import files
from offload_core.backend import (
    Backend,
    BackendOptions,
    Capabilities,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
)
from offload_core.keys import ObjectKey

T = TypeVar("T")

# aiofiles turns a blocking function into a coroutine function that runs it as one call on the given executor.
_load_all = wrap(files.load_all)
_store_all = wrap(files.store_all)


class DiskOptions(BackendOptions):
    """Options of the ``disk`` type."""

    path: Path = Field(description="folder for the objects; created when its parent exists")

    @field_validator("path")
    @classmethod
    def _parent_exists(cls, path: Path) -> Path:
        try:
            path = path.expanduser().absolute()
            exists, is_folder, has_parent = path.exists(), path.is_dir(), path.parent.is_dir()
        except (OSError, RuntimeError) as error:  # RuntimeError: ~user for a user that does not exist
            raise ValueError(f"{error}; name a folder that this process may use") from error
        if exists and not is_folder:
            raise ValueError(f"{path} is a file; name a folder")
        if not exists and not has_parent:
            raise ValueError(
                f"the parent folder {path.parent} does not exist; create it, or mount the disk that should be there"
            )
        return path


class DiskBackend(Backend[DiskOptions]):
    """One file per object on a local file system."""

    @property
    def capabilities(self) -> Capabilities:
        """A local disk that other processes may use too."""
        return Capabilities(medium="disk", persistent=True, shared=True, lists=True)

    async def open(self) -> None:
        """Create the folder if it is missing. A read-only one is no error: it can still be loaded from."""
        await self.run_blocking(files.make_private_folder, self.options.path)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.run_blocking(files.exist, [self._file(key) for key in keys])

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Let every key be tried: opening its file is the check, and nothing is evicted that would need a pin."""
        return LoadReservation([True] * len(keys))

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        return await self._batch(_load_all, keys, buffers)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""
        return await self._batch(_store_all, keys, buffers)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.run_blocking(files.delete, [self._file(key) for key in keys])

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`; one batch per folder of files."""
        root = self.options.path
        for folder in await self.run_blocking(files.object_folders, root):
            found = await self.run_blocking(files.objects_in, folder)
            namespace, pack = folder.parts[-3:-1]
            yield [
                StoredObject(ObjectKey(namespace, pack, bytes.fromhex(digest)), size, modified)
                for digest, size, modified in found
            ]

    async def _batch(
        self, operation: Callable[..., Awaitable[T]], keys: Sequence[ObjectKey], buffers: Sequence[memoryview]
    ) -> T:
        """Run ``operation`` on a whole batch in one thread hop; the core runs several batches at once."""
        paths = [self._file(key) for key in keys]
        return await self.run_to_the_end(operation(paths, buffers, executor=self.context.executor))

    def _file(self, key: ObjectKey) -> Path:
        digest = key.chunk_hash.hex()
        return self.options.path / key.namespace / key.pack / digest[:2] / f"{digest}{files.OBJECT_SUFFIX}"
