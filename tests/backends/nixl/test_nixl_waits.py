"""A lookup does not wait for transfers, and a load does not wait for stores."""

from __future__ import annotations

from typing import Any

from offload_backend_nixl.plugin import NIXL

from tests.support.held_threads import check_that_nothing_waits_for_slower_work


def test_lookups_wait_for_no_transfers_and_loads_for_no_stores(folder_options: dict[str, Any]) -> None:
    check_that_nothing_waits_for_slower_work(NIXL, folder_options)
