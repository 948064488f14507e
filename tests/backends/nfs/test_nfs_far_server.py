"""Lookups of long prompts on a distant object store: few round trips and few requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.far_bucket import CHUNK_TOKENS, FarTier, fill_bucket
from tests.support.far_proxy import FarProxy
from tests.support.s3_server import S3Server

STORED_CHUNKS = 480
PROMPT_TOKENS = 128 * 1024
MAX_ROUND_TRIPS, MAX_REQUESTS = 5, 64


@pytest.fixture(scope="module")
def bucket(_server: S3Server) -> str:
    """A bucket with most of a prompt's objects."""
    return fill_bucket(_server, STORED_CHUNKS)


@pytest.fixture(params=[0.02, 0.1], ids=["20 ms", "100 ms"])
def proxy(request: pytest.FixtureRequest, s3_server: S3Server) -> Iterator[FarProxy]:
    with FarProxy(s3_server.port, request.param).running() as proxy:
        yield proxy


@pytest.fixture
def far(bucket: str, proxy: FarProxy) -> Iterator[FarTier]:
    tier = FarTier(bucket, proxy)
    yield tier
    tier.close()


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_prompt_of_128k_tokens_is_found_in_few_round_trips(far: FarTier, proxy: FarProxy, ranks: int) -> None:
    before = proxy.requests
    assert far.ask(PROMPT_TOKENS, ranks).boundary_tokens == STORED_CHUNKS * CHUNK_TOKENS
    assert far.round_trips <= MAX_ROUND_TRIPS
    assert proxy.requests - before <= MAX_REQUESTS
    before = proxy.requests
    assert far.ask(PROMPT_TOKENS, ranks).boundary_tokens == STORED_CHUNKS * CHUNK_TOKENS
    assert proxy.requests - before <= MAX_REQUESTS / 4, "only the rest is searched again"
    before = proxy.requests
    assert far.ask(STORED_CHUNKS * CHUNK_TOKENS, ranks).boundary_tokens == (STORED_CHUNKS - 1) * CHUNK_TOKENS
    assert proxy.requests - before <= 4, "a part of a known prefix: its window alone is asked about"
