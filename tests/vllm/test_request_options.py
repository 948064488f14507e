"""A request's own wishes, in ``kv_transfer_params``."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.vllm.scheduler.request_state import RequestOptions

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
    ],
)
def test_a_request_opts_out_of_loading_or_storing(params: dict[str, Any] | None, options: RequestOptions) -> None:
    assert RequestOptions.of(_request(params)) == options


@pytest.mark.parametrize(
    ("wishes", "named"),
    [({"stor": False}, "stor: False"), ({"load": "no"}, "load: 'no'"), (False, "hybrid_offload: False")],
)
def test_invalid_options_exclude_loads_and_stores_with_a_warning(
    wishes: object, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert RequestOptions.of(_request({"hybrid_offload": wishes})) == NEITHER
    assert named in caplog.text
    assert '"load" and "store", each true or false' in caplog.text
