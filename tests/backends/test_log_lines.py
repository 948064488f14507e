"""Bundled backends log with their tier's logger, so that each line names the tier and the half that speaks."""

from __future__ import annotations

import re

from tests.support.paths import ROOT
from tests.support.source_files import relative

OF_NO_TIER = {
    "backends/lmcache/offload_backend_lmcache/server/abandoned_tasks.py",  # in the process of LMCache's server
    "backends/lmcache/offload_backend_lmcache/server/listener.py",
    "backends/lmcache/offload_backend_lmcache/server/lmcache_module.py",
    "backends/lmcache/offload_backend_lmcache/server/session.py",
    "backends/mooncake/offload_backend_mooncake/connections.py",  # a client that the tiers of a process share
}


def test_only_what_belongs_to_no_tier_has_a_logger_of_its_own() -> None:
    folders = "backends/*/offload_backend_*", "examples/*/offload_backend_*"
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    assert {relative(path) for path in files if re.search(r"\bgetLogger\b", path.read_text())} == OF_NO_TIER
