"""Lookups of long prompts on a distant object store: few round trips and few requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
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

CHUNK = 256
STORED_CHUNKS = 480
PROMPT_TOKENS = 128 * 1024
SECONDS = 60.0
MAX_ROUND_TRIPS, MAX_REQUESTS = 5, 64
RANKS = tuple(f"{rank:064x}" for rank in range(8))
PLANNER = HybridOffloadPlanner.build(
    [GroupGeometry(0, 16, HitPolicy("full")), GroupGeometry(1, 16, HitPolicy("window", 1024))],
    hash_block_size=16,
    max_model_len=1 << 20,
    hybrid_chunk_size=CHUNK,
)


def chunk_hash(unit: int) -> bytes:
    return unit.to_bytes(32, "big")


@pytest.fixture(scope="module")
def bucket(_server: S3Server) -> str:
    """A bucket with most of a prompt's objects, of the first rank."""
    name, client = _server.make_bucket(), _server.client()
    keys = [ObjectKey(RANKS[0], pack.name, chunk_hash(unit)) for pack in PLANNER.packs for unit in range(STORED_CHUNKS)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda key: client.put_object(Bucket=name, Key=f"kv/{name_of(key)}", Body=b"object"), keys))
    return name


class FarTier:
    """A tier on the bucket behind a proxy, with the questions that it was asked."""

    def __init__(self, bucket: str, proxy: FarProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        config = load_config(
            {
                "backends": [
                    {
                        "name": "far",
                        "type": "nfs",
                        "url": f"s3://{bucket}/kv",
                        "storage_options": {"endpoint_url": f"http://127.0.0.1:{proxy.port}"},
                        "lookup_cache_seconds": 0,
                    }
                ]
            }
        )
        self.io = IoLoop.acquire()
        self.tier = Tier(config.tiers[0], Limits(lookup_timeout_seconds=SECONDS), Counters())
        self.io.submit(self.tier.open()).result(SECONDS)
        self.lookups = LookupService(self.io, [self.tier], PLANNER, Counters())
        self.round_trips = 0
        medium: Any = self.tier.backend.medium  # type: ignore[attr-defined]
        sizes = medium.sizes

        def counted(names: Sequence[str]) -> Any:
            self.round_trips += 1
            return sizes(names)

        monkeypatch.setattr(medium, "sizes", counted)

    def ask(self, tokens: int, ranks: int) -> PrefixAnswer:
        self.round_trips = 0
        hashes = {pack.name: [chunk_hash(unit) for unit in range(tokens // CHUNK)] for pack in PLANNER.packs}
        lookup = self.lookups.start(PrefixQuery(hashes, RANKS[:ranks], 0, tokens - 1))
        began = time.monotonic()
        while not lookup.done():
            assert time.monotonic() - began < SECONDS
            self.lookups.wait_for_answer(0.1)
        return lookup.answers()["far"]

    def close(self) -> None:
        self.io.submit(self.tier.close()).result(SECONDS)
        self.io.release()


@pytest.fixture(params=[0.02, 0.1], ids=["20 ms", "100 ms"])
def proxy(request: pytest.FixtureRequest, s3_server: S3Server) -> Iterator[FarProxy]:
    with FarProxy(s3_server.port, request.param).running() as proxy:
        yield proxy


@pytest.fixture
def far(bucket: str, proxy: FarProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarTier]:
    tier = FarTier(bucket, proxy, monkeypatch)
    yield tier
    tier.close()


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_prompt_of_128k_tokens_is_found_in_few_round_trips(far: FarTier, proxy: FarProxy, ranks: int) -> None:
    before = proxy.requests
    assert far.ask(PROMPT_TOKENS, ranks).boundary_tokens == STORED_CHUNKS * CHUNK
    assert far.round_trips <= MAX_ROUND_TRIPS
    assert proxy.requests - before <= MAX_REQUESTS
    before = proxy.requests
    assert far.ask(PROMPT_TOKENS, ranks).boundary_tokens == STORED_CHUNKS * CHUNK
    assert proxy.requests - before <= MAX_REQUESTS / 4, "only the rest is searched again"
    before = proxy.requests
    assert far.ask(STORED_CHUNKS * CHUNK, ranks).boundary_tokens == (STORED_CHUNKS - 1) * CHUNK
    assert proxy.requests - before <= 4, "a part of a known prefix: its window alone is asked about"
