"""Objects in a bucket of an S3-compatible store. NIXL moves the bytes.

NIXL's plugin can neither delete nor list, tells no sizes, and does not tell an absent object from a failure. These
questions go to the same store through botocore. Each has a time limit and two tries.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any

from offload_backend_nixl.child.engine import Target
from offload_backend_nixl.child.storage import Pending, Storage
from offload_backend_nixl.protocol import ABSENT, MAX_NAME_BYTES, Entry, Outcome, can_carry

_BUCKET_CHECK_SECONDS = 1.0
_CLOCK_SECONDS = 2.0
"""The resolution of the store's times, and some more."""
_LOOKUP_THREADS = 8
_MAX_CONNECT_SECONDS = 3.0
_MAX_READ_SECONDS = 10.0


class BucketStorage(Storage):
    """A bucket, or the part of it below a prefix.

    Args:
        params: the parameters of NIXL's plugin.
        credentials: explicit credentials, by NIXL's names for them.
        prefix: the beginning of all names.
        deadline_seconds: limit on one request of the parent.

    Raises:
        OSError: the bucket cannot be used.
    """

    finishes_slowly = True

    def __init__(
        self, params: Mapping[str, str], credentials: Mapping[str, str], prefix: str, deadline_seconds: float
    ) -> None:
        self._bucket = params["bucket"]
        self._prefix = f"{prefix}/" if prefix else ""
        self._place = f"bucket {self._bucket} at {_endpoint(params) or 'AWS'}"
        self._client = _make_client(params, credentials, deadline_seconds)
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, "lookup")
        self._bucket_seen_seconds = float("-inf")
        self._check_bucket()

    def begin_load(self, name: str, nbytes: int) -> Pending | Outcome:
        """See :meth:`Storage.begin_load`. The store is asked only after a failure."""
        return _ObjectLoad(self, name, nbytes)

    def begin_store(self, name: str, nbytes: int) -> Pending:
        """See :meth:`Storage.begin_store`. A put makes an object visible whole."""
        return _ObjectStore(self, name)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """See :meth:`Storage.sizes`. Several requests run at the same time."""
        found = list(self._lookups.map(self._size, names))
        if ABSENT in found:
            self._check_bucket()
        return found

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Storage.delete`."""
        if not names:
            return
        objects = [{"Key": self.key_of(name)} for name in names]
        answer = self._ask("delete_objects", Delete={"Objects": objects, "Quiet": True})
        for problem in answer.get("Errors", []):
            if problem.get("Code") != "NoSuchKey":
                raise OSError(errno.EIO, f"{self._place} refused a deletion: {problem.get('Code')}")

    def list_after(self, name: str, limit: int) -> tuple[list[Entry], bool]:
        """See :meth:`Storage.list_after`. A page of foreign objects is one entry, with a short name after them."""
        after = self.key_of(name) if name else ""
        answer = self._ask("list_objects_v2", Prefix=self._prefix, StartAfter=after, MaxKeys=limit)
        found = [(one["Key"].removeprefix(self._prefix), one) for one in answer.get("Contents", [])]
        entries = [
            Entry(found_name, int(one["Size"]), one["LastModified"].timestamp())
            for found_name, one in found
            if can_carry(found_name)
        ]
        more = bool(answer.get("IsTruncated")) and bool(found)
        if more and not entries:
            place = _short_name_after(found[-1][0])
            if place <= name:
                raise OSError(errno.EIO, f"{self._place} has foreign names that no listing can pass over; remove them")
            entries = [Entry(place, 0, 0.0)]
        return entries, more

    def key_of(self, name: str) -> str:
        """Return the key of an object in the bucket."""
        return self._prefix + name

    def reason_of_failed_load(self, name: str, nbytes: int, began_seconds: float) -> Outcome:
        """Return whether an object that NIXL could not read is absent, is new, or has another size.

        NIXL reports all failures alike. An object that was stored after the load had begun may have been absent then.

        Raises:
            OSError: none of these; the store failed.
        """
        head = self._head(name)
        if head is None:
            self._check_bucket()
            return Outcome.MISS
        if head["ContentLength"] != nbytes:
            return Outcome.CORRUPT
        if _age_seconds(head) <= time.monotonic() - began_seconds + _CLOCK_SECONDS:
            return Outcome.MISS
        raise OSError(errno.EIO, f"NIXL could not read an object of {self._place}, which is there")

    def reason_of_failed_store(self) -> OSError:
        """Return an error that tells a store that is gone from one that refused an object."""
        try:
            self._check_bucket(at_once=True)
        except OSError as error:
            return error
        return OSError(errno.EIO, f"NIXL could not write to {self._place}, which answers; may the credentials write?")

    def _size(self, name: str) -> int:
        head = self._head(name)
        return ABSENT if head is None else int(head["ContentLength"])

    def _head(self, name: str) -> Any:
        return self._ask("head_object", absent=("404", "NoSuchKey", "NotFound"), Key=self.key_of(name))

    def _check_bucket(self, at_once: bool = False) -> None:
        """Raise if the bucket is gone: the answer to the question for an object does not tell."""
        if not at_once and time.monotonic() - self._bucket_seen_seconds < _BUCKET_CHECK_SECONDS:
            return
        if self._ask("head_bucket", absent=("404", "NoSuchBucket", "NotFound")) is None:
            raise OSError(errno.ENODEV, f"there is no {self._place}; create it, or correct params.bucket")
        self._bucket_seen_seconds = time.monotonic()

    def _ask(self, method: str, absent: Sequence[str] = (), **arguments: Any) -> Any:
        """Return the answer of the store, or ``None`` for an error code in ``absent``.

        Raises:
            OSError: the store failed, did not answer in time, or refused the request.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, method)(Bucket=self._bucket, **arguments)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code"))
            if code in absent:
                return None
            if code in ("403", "AccessDenied", "Forbidden"):
                raise OSError(
                    errno.EACCES,
                    f"access to {self._place} is denied; give credentials that may use it, as AWS_… in the environment",
                ) from error
            raise OSError(errno.EIO, f"{self._place} answered {code} to {method}") from error
        except BotoCoreError as error:
            raise OSError(errno.EHOSTUNREACH, f"{self._place} does not answer: {error}") from error


class _ObjectLoad(Pending):
    """An object that is read."""

    def __init__(self, storage: BucketStorage, name: str, nbytes: int) -> None:
        self.target = Target(object_name=storage.key_of(name))
        self._storage = storage
        self._name = name
        self._nbytes = nbytes
        self._began_seconds = time.monotonic()

    def finish(self, succeeded: bool) -> Outcome:
        """See :meth:`Pending.finish`. A shorter or longer object is a success here, and found by its head or tail."""
        if succeeded:
            return Outcome.DONE
        return self._storage.reason_of_failed_load(self._name, self._nbytes, self._began_seconds)


class _ObjectStore(Pending):
    """An object that is written."""

    def __init__(self, storage: BucketStorage, name: str) -> None:
        self.target = Target(object_name=storage.key_of(name))
        self._storage = storage

    def finish(self, succeeded: bool) -> Outcome:
        """See :meth:`Pending.finish`."""
        if not succeeded:
            raise self._storage.reason_of_failed_store()
        return Outcome.DONE


def _short_name_after(name: str) -> str:
    """Return a name that a message can have, after a longer one and all others that begin alike. It is no object's."""
    last_character = "\U0010ffff"
    room = MAX_NAME_BYTES - len(last_character.encode())
    return name.encode(errors="replace")[:room].decode(errors="ignore") + last_character


def _age_seconds(head: Mapping[str, Any]) -> float:
    """Return the age of an object by the clock of the store."""
    headers = head.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        now = parsedate_to_datetime(headers["date"])
        return float((now - head["LastModified"]).total_seconds())
    except (KeyError, TypeError, ValueError):
        return 0.0  # the store tells no time


def nixl_params(params: Mapping[str, str], credentials: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters for NIXL, completed so that both clients use the same store, region and credentials."""
    given = {"num_threads": "8", **params, **credentials, "region": _region(params)}
    endpoint = _endpoint(params)
    if endpoint is not None:
        given["endpoint_override"] = endpoint
        given["scheme"] = endpoint.partition("://")[0]
    return given


def _make_client(params: Mapping[str, str], credentials: Mapping[str, str], deadline_seconds: float) -> Any:
    import botocore.session
    from botocore.config import Config

    limit = deadline_seconds / 10  # a transfer, a question and a check of the bucket may follow each other
    virtual = params.get("use_virtual_addressing", "false") == "true"
    config = Config(
        connect_timeout=min(limit, _MAX_CONNECT_SECONDS),
        read_timeout=min(limit, _MAX_READ_SECONDS),
        retries={"total_max_attempts": 2, "mode": "standard"},
        max_pool_connections=_LOOKUP_THREADS + 2,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "virtual" if virtual else "path"},
    )
    return botocore.session.Session().create_client(
        "s3",
        region_name=_region(params),
        endpoint_url=_endpoint(params),
        aws_access_key_id=credentials.get("access_key"),
        aws_secret_access_key=credentials.get("secret_key"),
        aws_session_token=credentials.get("session_token"),
        verify=params.get("ca_bundle"),
        config=config,
    )


def _endpoint(params: Mapping[str, str]) -> str | None:
    endpoint = params.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_OVERRIDE")
    if endpoint and "://" not in endpoint:
        endpoint = f"{params.get('scheme', 'https')}://{endpoint}"
    return endpoint or None


def _region(params: Mapping[str, str]) -> str:
    """Return the region of both clients, from the sources that AWS documents: parameters, environment, its own file."""
    import botocore.session

    names = ("AWS_REGION", "AWS_DEFAULT_REGION")
    given = params.get("region") or next((os.environ[name] for name in names if os.environ.get(name)), None)
    return given or botocore.session.Session().get_config_variable("region") or "us-east-1"
