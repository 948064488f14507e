"""Every code block of every document is run by a test, which this table names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_plain_english import DOCUMENTS
from tests.support.documents import blocks
from tests.support.paths import ROOT
from tests.support.source_files import relative

RUN_BY = {
    "README.md": {
        "$ make demo": "test_the_demo_is_served_from_disk_with_the_same_outputs",
        "# offload.yaml": "test_readme_configuration_is_valid_and_is_the_example_file",
        "$ vllm serve MODEL": "test_two_server_lifetimes",
    },
    "CONTRIBUTING.md": {
        "$ make install": "test_make_targets_of_the_documents_exist",
        "$ .venv/bin/python -m pytest": "test_folders_named_in_contributing_exist",
    },
    "docs/benchmarks.md": {"$ make plots": "test_make_targets_of_the_documents_exist"},
    "docs/cli.md": {
        "$ offload-core plugins": "test_commands_run_as_shown",
        "$ offload-core plan": "test_the_document_shows_what_the_command_prints",
    },
    "docs/distributed.md": {
        "# offload.yaml": "test_configurations_of_the_documents_are_valid",
        "$ KV_TOKEN": "test_the_programs_of_the_document_have_its_flags",
        "$ mooncake_": "test_the_programs_of_the_document_have_its_flags",
        "ip netns add": "test_the_commands_for_two_hosts_make_two_hosts",
    },
    "docs/elsewhere.md": {
        "vllm serve MODEL": "test_the_recipe_of_the_document_serves",
        "# offload.yaml": "test_the_recipe_of_the_document_serves",
        "lmcache server": "test_the_recipe_for_lmcache_serves",
        "python -m sglang.launch_server": "test_the_recipe_for_sglang_serves",
    },
    "docs/multi-connector.md": {"vllm serve MODEL": "test_the_recipe_of_the_document_starts"},
    "docs/object-format.md": {"FINGERPRINT/PACK": "test_the_path_is_that_of_the_media"},
    "docs/quickstart.md": {
        "$ make demo": "test_the_demo_is_served_from_disk_with_the_same_outputs",
        "# offload.yaml": "test_configurations_of_the_documents_are_valid",
        "$ offload-core check": "test_commands_run_as_shown",
        "$ vllm serve MODEL": "test_the_quickstart_serves_as_the_readme_does",
    },
    "docs/sizing.md": {
        "$ offload-core simulate": "test_commands_run_as_shown",
        "$ offload-core advise": "test_the_advice_is_that_of_the_command",
        "# offload.yaml": "test_configurations_of_the_documents_are_valid",
        '{"timestamp"': "test_the_lines_in_the_document_are_a_trace",
        '{"format"': "test_the_lines_in_the_document_are_a_trace",
    },
    "docs/hints.md": {
        '{\n  "model"': "test_the_hints_and_the_answer_of_the_document_are_real",
        '{\n  "hybrid_offload_hints"': "test_the_hints_and_the_answer_of_the_document_are_real",
    },
    "docs/io-process.md": {"# offload.yaml": "test_configurations_of_the_documents_are_valid"},
    "docs/security.md": {
        "# offload.yaml": "test_configurations_of_the_documents_are_valid",
        "$ export": "test_the_command_of_the_document_makes_a_key",
    },
    "docs/tiers.md": {"# offload.yaml": "test_configurations_of_the_documents_are_valid"},
    "plugins.md": {
        "from collections.abc import Sequence\n\nfrom pydantic": "test_plugin_example_works_as_shown",
        "[project.entry-points": "test_plugin_example_works_as_shown",
        "import pytest": "test_plugin_example_is_proved_as_shown",
        "C5: ": "test_plugins_md_shows_a_report_of_the_state_machine_as_it_is",
        "import hypothesis": "test_plugin_example_runs_on_the_harness",
        "import asyncio": "test_plugin_example_runs_on_the_harness",
        "from collections.abc import Sequence\nfrom typing": "test_the_example_of_a_wrapper_makes_a_tier_read_only",
        "import os\n\nfrom offload_core.api import CHECK": "test_the_example_of_a_load_in_one_call_reads_and_checks",
        "import os\n\nfrom offload_core.api import StoreSeal": (
            "test_the_example_of_a_store_that_seals_writes_the_sealed_object"
        ),
        "import logging": "test_the_example_of_an_observer_logs_what_it_says",
        "pyproject.toml": "test_packaging_section_shows_what_the_template_has",
        "[project]": "test_packaging_section_shows_what_the_template_has",
    },
}
"""The beginning of each code block, and the test that runs it."""


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if "examples" not in path.parts], ids=relative)
def test_every_code_block_is_run_by_a_test(path: Path) -> None:
    beginnings = RUN_BY.get(relative(path), {})
    shown = blocks(path.read_text())
    for block in shown:
        assert [begin for begin in beginnings if block.startswith(begin)], f"no test is known to run:\n{block}"
    for begin in beginnings:
        assert any(block.startswith(begin) for block in shown), f"no block begins so any more: {begin!r}"
    sources = "".join(source.read_text() for source in (ROOT / "tests").rglob("test_*.py"))
    assert [test for test in beginnings.values() if f"\ndef {test}(" not in sources] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {_anchor(heading) for heading in headings}, target


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
