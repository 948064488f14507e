"""S3 and what speaks its language, by s3fs: one request for each thing, where s3fs by itself makes two.

s3fs looks for a folder when an object is missing (a listing), and asks for an object's size before it reads it.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from fsspec.asyn import sync

from offload_backend_nfs.storage.fsspec_store import AT_ONCE, ObjectStore

_DELETE_BATCH = 1000
"""What S3 takes in one request."""
_LEAST_TIMEOUT_SECONDS = 1.0
_MOST_CONNECT_SECONDS = 3.0


def s3_options(options: Mapping[str, Any], retry_seconds: float) -> dict[str, Any]:
    """Return s3fs's options: an answer is waited for no longer than ``retry_seconds``, and botocore tries once.

    What ``options`` say themselves stands.
    """
    timeout = max(_LEAST_TIMEOUT_SECONDS, retry_seconds)
    config = {
        "connect_timeout": min(timeout, _MOST_CONNECT_SECONDS),
        "read_timeout": timeout,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": AT_ONCE,
        # Objects have a checksum of their own, and not every server knows the newer ones of S3.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return {**options, "config_kwargs": {**config, **(options.get("config_kwargs") or {})}}


class S3Store(ObjectStore):
    """A prefix of an S3 bucket.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        root: ``bucket`` or ``bucket/prefix``.
        part_bytes: objects of at least twice this size are sent in parts.
    """

    def __init__(self, fs: Any, root: str, part_bytes: int) -> None:
        super().__init__(fs, root)
        self._bucket, _, prefix = self._root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._fs.retries = 1  # tries, in s3fs's words; its waits grow to 15 s and know no deadline

    def open(self) -> None:
        """See :meth:`Medium.open`."""
        try:
            self._call("head_bucket")
        except FileNotFoundError as error:
            raise self._no_bucket(self._bucket) from error
        except PermissionError as error:
            raise PermissionError(
                errno.EACCES,
                f"this account may not use it ({error}); credentials are looked for in the environment (AWS_…), in "
                "fsspec's configuration and in AWS's own",
                self._bucket,
            ) from error

    def close(self) -> None:
        """See :meth:`Medium.close`."""
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            self._fs.close_session(self._fs.loop, creator)

    def _fetch(self, name: str, nbytes: int) -> bytes | None:
        """See :meth:`ObjectStore._fetch`: one request, and no body where the size is another."""
        data: bytes | None = sync(self._fs.loop, self._get, name, nbytes)
        return data

    def store(self, name: str, buffer: memoryview) -> None:
        """See :meth:`Medium.store`; a large object in parts, several at once.

        What a killed writer sent of one stays on the server, unseen, until a rule of the bucket ends such uploads.
        """
        self._fs.pipe_file(self._path(name), bytes(buffer), chunksize=self._part_bytes)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`; by ``If-None-Match``, which servers of other makes must know."""
        try:
            self._fs.pipe_file(self._path(name), data, mode="create", chunksize=self._part_bytes)
        except FileExistsError:
            return False
        except OSError as error:
            if _code(error) in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Medium.delete`; a thousand in one request."""
        for start in range(0, len(names), _DELETE_BATCH):
            objects = [{"Key": self._prefix + name} for name in names[start : start + _DELETE_BATCH]]
            answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", []):
                if error.get("Code") != "NoSuchKey":
                    raise OSError(
                        errno.EIO, f"cannot delete: {error.get('Code')}: {error.get('Message')}", error["Key"]
                    )

    def read_small(self, name: str) -> bytes | None:
        """See :meth:`Medium.read_small`."""
        data: bytes | None = sync(self._fs.loop, self._get, name, None)
        return data

    async def _size_soon(self, name: str) -> int | None:
        """Return the size by one HEAD. Cancellation has no effect on the medium."""
        try:
            found = await self._fs._call_s3("head_object", Bucket=self._bucket, Key=self._prefix + name)
        except FileNotFoundError:
            return None
        return int(found["ContentLength"])

    async def _get(self, name: str, nbytes: int | None) -> bytes | None:
        """Read an object by one GET; nothing of one that has not ``nbytes``. Cancellation has no effect."""
        try:
            found = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + name)
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise OSError(errno.ENODEV, "the bucket is gone", self._bucket) from error
            return None
        async with found["Body"] as body:
            if nbytes is not None and found["ContentLength"] != nbytes:
                return bytes(1 if nbytes == 0 else 0)  # of another size, as the object is
            data: bytes = await body.read()
            return data

    def _call(self, method: str, **arguments: Any) -> Any:
        return sync(self._fs.loop, self._fs._call_s3, method, Bucket=self._bucket, **arguments)


def _code(error: BaseException) -> str | None:
    """Return S3's own word for an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return str(code) if code is not None else None
