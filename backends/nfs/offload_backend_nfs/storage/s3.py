"""S3 and compatible stores, through s3fs: one request per operation.

s3fs by itself makes two requests. It lists a folder if an object is missing, and asks for the size before a read.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsspec.asyn import sync

from offload_backend_nfs.storage import layout
from offload_backend_nfs.storage.base import MAX_SMALL_BYTES, Entry
from offload_backend_nfs.storage.failures import DeletionErrors, ForeignFileError, UnreadableObjectError
from offload_backend_nfs.storage.fsspec_store import MAX_CONCURRENT_REQUESTS, ObjectStore, time_of
from offload_core.api import LoadCheck, LoadOutcome, StoreSeal

_DELETE_BATCH = 1000
"""The most keys that S3 accepts in one request."""
_PAGE_KEYS = 200
"""Keys in a page of a listing. botocore reads a page with the interpreter lock held, 1000 keys for 30 ms and more."""
_MAX_PAGE_KEYS = 1000
"""Keys in a page among foreign keys. S3 gives no longer pages."""
_PAUSE_PER_PAGE_SECONDS = 0.02
"""Pause between two pages, for the answers to loads."""
_MIN_TIMEOUT_SECONDS = 1.0
_MAX_CONNECT_SECONDS = 3.0


def s3_options(options: Mapping[str, Any], retry_seconds: float) -> dict[str, Any]:
    """Return the options for s3fs: a request times out after ``retry_seconds``, and botocore does not retry.

    Values in ``options`` have priority.
    """
    timeout = max(_MIN_TIMEOUT_SECONDS, retry_seconds)
    config = {
        "connect_timeout": min(timeout, _MAX_CONNECT_SECONDS),
        "read_timeout": timeout,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": MAX_CONCURRENT_REQUESTS,
        # Objects carry their own checksum, and some servers do not support the newer checksums of S3.
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
        self._fs.retries = 1  # s3fs counts tries; its own waits grow to 15 s and have no deadline

    def open(self) -> None:
        """See :meth:`Medium.open`."""
        try:
            self._call("head_bucket")
        except FileNotFoundError as error:
            raise self._no_bucket(self._bucket) from error
        except PermissionError as error:
            raise PermissionError(
                errno.EACCES,
                f"access to the bucket is denied ({error}); give credentials that may use it, in the environment "
                "(AWS_…), in fsspec's configuration or in AWS's own",
                self._bucket,
            ) from error

    def close(self) -> None:
        """See :meth:`Medium.close`."""
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            self._fs.close_session(self._fs.loop, creator)

    def load(self, name: str, buffer: memoryview, check: LoadCheck | None = None) -> LoadOutcome:
        """See :meth:`Medium.load`. A rule of the bucket may have moved the object to a class that cannot be read."""
        try:
            return super().load(name, buffer, check)
        except PermissionError as error:
            code = _error_code(error)
            if code not in ("InvalidObjectState", "AccessDenied"):
                raise
            raise UnreadableObjectError(error, is_certain=code == "InvalidObjectState") from error

    def _fetch(self, name: str, nbytes: int) -> bytes | None:
        """See :meth:`ObjectStore._fetch`. One request; an object of another size is not transferred."""
        data: bytes | None = sync(self._fs.loop, self._get_async, name, nbytes)
        return data

    def store(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> None:
        """See :meth:`Medium.store`. A large object is sent in parts, several at once.

        If a writer is killed, its parts stay on the server, invisible, until a rule of the bucket ends such uploads.
        """
        if seal is not None:
            seal.seal()
        self._fs.pipe_file(self._path(name), bytes(buffer), chunksize=self._part_bytes)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`. Uses ``If-None-Match``, which a compatible server must support."""
        try:
            self._fs.pipe_file(self._path(name), data, mode="create", chunksize=self._part_bytes)
        except FileExistsError:
            return False
        except OSError as error:
            if _error_code(error) in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Medium.delete`. One request deletes a thousand objects."""
        errors = DeletionErrors()
        for start in range(0, len(names), _DELETE_BATCH):
            objects = [{"Key": self._prefix + name} for name in names[start : start + _DELETE_BATCH]]
            answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", []):
                code, key = error.get("Code"), error["Key"]
                if code == "NoSuchKey":
                    continue
                told = f"the server refused a deletion: {code}: {error.get('Message')}"
                if code != "AccessDenied":
                    raise OSError(errno.EIO, told, key)
                errors.add(key.removeprefix(self._prefix), PermissionError(errno.EACCES, told, key))
        errors.raise_any(len(names))

    def read_small(self, name: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """See :meth:`Medium.read_small`. One request; of an object that is too large, no body is read."""
        data: bytes | None = sync(self._fs.loop, self._get_async, name, None, max_bytes)
        return data

    def _entries(self, folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
        """List a folder in short pages with pauses, so that loads go on, and without the listing of its folders.

        In a folder of folders, other keys than those of the layout may be any number. So the listing jumps over them.
        Among keys that look like ours, and cannot be jumped over, the pages grow.
        """
        page_keys = _PAGE_KEYS
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        found: list[Entry] = []
        place: dict[str, str] = {}
        while True:
            progress()
            try:
                page = self._call("list_objects_v2", Prefix=prefix, Delimiter="/", MaxKeys=page_keys, **place)
            except FileNotFoundError:
                return found
            folders = [one["Prefix"][len(prefix) :] for one in page.get("CommonPrefixes", [])]
            files = {one["Key"][len(prefix) :]: one for one in page.get("Contents", [])}
            found += [Entry(name[:-1], True, 0, time.time()) for name in folders if name != "/"]
            found += [Entry(name, False, int(one["Size"]), time_of(one)) for name, one in files.items() if name]
            if not page.get("IsTruncated"):
                return found
            is_foreign = not folders and layout.holds_folders(folder)
            page_keys = min(2 * page_keys, _MAX_PAGE_KEYS) if is_foreign else _PAGE_KEYS
            last = max([*folders, *files], default="")
            jump = layout.last_impossible_name(folder, last) if list(files) == sorted(files) else last
            if jump is None:
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}
            place = token if jump == last else {"StartAfter": prefix + jump}
            time.sleep(_PAUSE_PER_PAGE_SECONDS)

    async def _size_async(self, name: str) -> int | None:
        """Return the size with one HEAD request. Cancellation has no effect on the medium."""
        try:
            found = await self._fs._call_s3("head_object", Bucket=self._bucket, Key=self._prefix + name)
        except FileNotFoundError:
            return None
        return int(found["ContentLength"])

    async def _get_async(self, name: str, nbytes: int | None, max_bytes: int | None = None) -> bytes | None:
        """Read an object with one GET request. Cancellation has no effect on the medium.

        If the object's size is not ``nbytes``, the result has a wrong size too, and no body is read.
        """
        try:
            found = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + name)
        except FileNotFoundError as error:
            if _error_code(error) == "NoSuchBucket":
                raise OSError(errno.ENODEV, "the bucket is gone; create it again", self._bucket) from error
            return None
        async with found["Body"] as body:
            if nbytes is not None and found["ContentLength"] != nbytes:
                return bytes(1 if nbytes == 0 else 0)  # any wrong size
            if max_bytes is not None and found["ContentLength"] > max_bytes:
                raise ForeignFileError(errno.EINVAL, f"it has more than {max_bytes} bytes", self._path(name))
            data: bytes = await body.read()
            return data

    def _call(self, method: str, **arguments: Any) -> Any:
        return sync(self._fs.loop, self._fs._call_s3, method, Bucket=self._bucket, **arguments)


def _error_code(error: BaseException) -> str | None:
    """Return the S3 error code behind an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return str(code) if code is not None else None
