"""The files of objects in an L2 on disk."""

from __future__ import annotations

import os
from pathlib import Path

from offload_backend_lmcache.server import stored_form
from offload_backend_lmcache.server.stored_form import HEADER_BYTES

from tests.support.clusters.lmcache import LMCacheCluster
from tests.support.polling import wait_until


def files(cluster: LMCacheCluster, name: bytes) -> list[Path]:
    """Return the files of an object and of its size record, without those that LMCache is still writing."""
    assert cluster.l2 is not None, "the cluster has no L2"
    digest = stored_form.digest(name).hex()
    found = [path for path in Path(cluster.l2["base_path"]).rglob("*") if digest in path.name]
    return [path for path in found if path.suffix != ".tmp" and path.is_file()]


def object_file(cluster: LMCacheCluster, name: bytes) -> Path:
    """Return the file of an object."""
    return max(files(cluster, name), key=lambda path: path.stat().st_size)


def wait_until_written(cluster: LMCacheCluster, name: bytes, nbytes: int | None = None) -> None:
    """Wait until LMCache has written an object and its size record."""
    wait_until(
        lambda: _is_written(cluster, name, nbytes) and cluster.is_at_rest(),
        "LMCache does not write an object to its L2",
    )


def _is_written(cluster: LMCacheCluster, name: bytes, nbytes: int | None) -> bool:
    sizes = sorted(path.stat().st_size for path in files(cluster, name))
    if len(sizes) != 2 or sizes[0] != HEADER_BYTES:
        return False
    return sizes[1] > HEADER_BYTES if nbytes is None else sizes[1] == HEADER_BYTES + nbytes


def cut_short(cluster: LMCacheCluster, name: bytes) -> None:
    """Cut the file of an object short, and remove the object from memory."""
    wait_until_written(cluster, name)
    cluster.clear_memory()
    os.truncate(object_file(cluster, name), 500)
