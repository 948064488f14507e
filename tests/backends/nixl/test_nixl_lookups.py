"""A lookup does not wait for transfers."""

from __future__ import annotations

from typing import Any

from offload_backend_nixl.plugin import NIXL

from tests.support.held_threads import lookups_beside_held_threads


def test_lookups_are_answered_while_transfers_hold_all_threads(folder_options: dict[str, Any]) -> None:
    assert lookups_beside_held_threads(NIXL, folder_options) == [[True], [True]]
