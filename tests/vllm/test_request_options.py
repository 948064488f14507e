"""A request's own wishes, in ``kv_transfer_params``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.vllm.metadata import StepReport
from offload_core.vllm.scheduler.request_options import RequestOptions
from tests.vllm.test_scheduler_half import Half, request

TIERS = ["ram", "disk"]
BOTH = RequestOptions(load=True, store=True)
NEITHER = RequestOptions(load=False, store=False)


def _request(params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(request_id="r1", kv_transfer_params=params)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (None, BOTH),
        ({}, BOTH),
        ({"another connector's": 1}, BOTH),
        ({"hybrid_offload": {}}, BOTH),
        ({"hybrid_offload": {"store": False}}, RequestOptions(load=True, store=False)),
        ({"hybrid_offload": {"load": False}}, RequestOptions(load=False, store=True)),
        ({"hybrid_offload": {"max_load_tokens": 0}}, RequestOptions(max_load_tokens=0)),
        ({"hybrid_offload": {"tiers": ["disk", "ram"]}}, RequestOptions(tiers=("disk", "ram"))),
    ],
)
def test_a_request_opts_out_of_loading_or_storing(params: dict[str, Any] | None, options: RequestOptions) -> None:
    assert RequestOptions.of(_request(params), TIERS) == options


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({"stor": False}, "stor: False"),
        ({"load": "no"}, "load: 'no'"),
        (False, "hybrid_offload: False"),
        ({"max_load_tokens": -1}, "max_load_tokens: -1"),
        ({"max_load_tokens": True}, "max_load_tokens: True"),
        ({"tiers": ["ram", "dsik"]}, "no tier has the name 'dsik'"),
        ({"tiers": []}, "tiers: []"),
        ({"tiers": "ram"}, "tiers: 'ram'"),
    ],
)
def test_invalid_options_exclude_loads_and_stores_with_a_warning(
    wishes: object, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert RequestOptions.of(_request({"hybrid_offload": wishes}), TIERS) == NEITHER
    assert named in caplog.text
    assert '"load" and "store", each true or false' in caplog.text
    assert "names: 'ram', 'disk'" in caplog.text


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half()
    made.follow(request("stored"))
    made.store(stored=80)
    yield made
    made.half.shutdown()


def _wishes(name: str, **wishes: object) -> Any:
    return request(name, kv_transfer_params={"hybrid_offload": wishes})


@pytest.mark.parametrize(
    ("most", "computed", "loaded"), [(0, 0, 0), (15, 0, 0), (47, 0, 32), (47, 16, 32), (80, 0, 64)]
)
def test_a_load_brings_at_most_so_many_tokens_past_the_local_prefix(
    half: Half, most: int, computed: int, loaded: int
) -> None:
    assert half.matched(half.follow(_wishes("limited", max_load_tokens=most)), computed) == loaded


def test_a_limited_request_gets_no_second_load_after_one_that_was_incomplete(half: Half) -> None:
    for name, wishes, again in (("free", {}, 64), ("limited", {"max_load_tokens": 64}, 0)):
        item = half.follow(_wishes(name, **wishes))
        assert half.matched(item) == 64
        half.load(item, 64)
        (load,) = half.step().loads
        half.half.take_output({name}, {name}, StepReport())
        assert half.matched(item) == again
        half.half.request_finished(item)
        assert load.request_id == name


def test_a_request_loads_from_the_tiers_that_it_names(half: Half) -> None:
    (tier,) = half.half._tier_names
    assert half.matched(half.follow(_wishes("named", tiers=[tier]))) == 64
    assert half.matched(half.follow(_wishes("unknown", tiers=["another"]))) == 0
    assert half.stored(named=80, unknown=80) == []
