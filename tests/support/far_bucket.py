"""A long prompt's objects in a bucket on a distant server, and lookups of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from offload_backend_nfs.storage.layout import name_of

from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.config.loading import load_config
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery
from offload_core.lookup.service import LookupService
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.tier import Tier
from tests.support.far_proxy import FarProxy
from tests.support.s3_server import S3Server

CHUNK_TOKENS = 256
RANKS = tuple(f"{rank:064x}" for rank in range(8))
PLANNER = HybridOffloadPlanner.build(
    [GroupGeometry(0, 16, HitPolicy("full")), GroupGeometry(1, 16, HitPolicy("window", 1024))],
    hash_block_size=16,
    max_model_len=1 << 20,
    hybrid_chunk_size=CHUNK_TOKENS,
)
_SECONDS = 60.0


def prompt_keys(chunks: int, ranks: int = 1) -> list[ObjectKey]:
    """Return the objects of a prompt's first chunks."""
    return [
        ObjectKey(rank, pack.name, digest)
        for rank in RANKS[:ranks]
        for pack in PLANNER.packs
        for digest in _hashes(chunks)
    ]


def fill_bucket(server: S3Server, chunks: int) -> str:
    """Make a bucket with the first rank's objects of a prompt's first chunks, and return its name."""
    name, client = server.make_bucket(), server.client()
    with ThreadPoolExecutor(4) as threads:
        put = (
            threads.submit(client.put_object, Bucket=name, Key=f"kv/{name_of(key)}", Body=b"object")
            for key in prompt_keys(chunks)
        )
        for future in list(put):
            future.result()
    return name


class FarTier:
    """A tier on the bucket behind a proxy. Call :meth:`close` at the end.

    Attributes:
        round_trips: the number of questions to the medium of the last lookup, each about many objects.
    """

    def __init__(self, bucket: str, proxy: FarProxy) -> None:
        options = {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        far = {"name": "far", "type": "nfs", "url": f"s3://{bucket}/kv", "lookup_cache_seconds": 0}
        config = load_config({"backends": [{**far, "storage_options": options}]})
        self.round_trips = 0
        self._io = IoLoop.acquire()
        self.tier = Tier(config.tiers[0], Limits(lookup_timeout_seconds=_SECONDS), Counters())
        self._io.submit(self.tier.open()).result(_SECONDS)
        self._count_round_trips()
        self.forget()

    def forget(self) -> None:
        """Let the next lookup know of no object."""
        self._lookups = LookupService(self._io, [self.tier], PLANNER, Counters())

    def ask(self, tokens: int, ranks: int) -> PrefixAnswer:
        """Return the answer to a lookup of a prompt."""
        self.round_trips = 0
        hashes = {pack.name: _hashes(tokens // CHUNK_TOKENS) for pack in PLANNER.packs}
        lookup = self._lookups.start(PrefixQuery(hashes, RANKS[:ranks], 0, tokens - 1))
        began = time.monotonic()
        while not lookup.done():
            assert time.monotonic() - began < _SECONDS, "the lookup has no answer"
            self._lookups.wait_for_answer(0.1)
        return lookup.answers()["far"]

    def ask_about_all(self, tokens: int, ranks: int) -> None:
        """Ask about every object of a prompt at once."""
        self._io.submit(self.tier.lookup(prompt_keys(tokens // CHUNK_TOKENS, ranks))).result(_SECONDS)

    def close(self) -> None:
        """Close the tier."""
        self._io.submit(self.tier.close()).result(_SECONDS)
        self._io.release()

    def _count_round_trips(self) -> None:
        medium: Any = self.tier.backend.medium  # type: ignore[attr-defined]
        sizes = medium.sizes

        def counted(names: Any) -> Any:
            self.round_trips += 1
            return sizes(names)

        medium.sizes = counted


def _hashes(chunks: int) -> list[bytes]:
    return [unit.to_bytes(32, "big") for unit in range(chunks)]
