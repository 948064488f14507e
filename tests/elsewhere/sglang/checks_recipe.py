"""The recipe of the document, below SGLang's prefix cache on a CPU. A whole server needs a GPU."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from tests.elsewhere.sglang.machinery import MODELS, same, server
from tests.support.documents import blocks
from tests.support.paths import ROOT


def test_the_command_of_the_document_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "elsewhere.md").read_text()
    (command,) = (block for block in blocks(document, "bash") if "sglang.launch_server" in block)
    monkeypatch.chdir(tmp_path)
    Path("offload.yaml").write_text(blocks(document, "yaml")[0])
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(shlex.split(command.replace("\\\n", ""))[3:])
    assert given.enable_hierarchical_cache
    assert given.hicache_storage_backend == "dynamic"
    keys = json.loads(given.hicache_storage_backend_extra_config)
    arguments = {"layout": given.hicache_mem_layout, "interface_v1": keys["interface_v1"]}
    with server(MODELS["mamba"], keys, **arguments) as one:
        assert type(one.backend).__name__ == keys["class_name"]
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        one.store(prompt)
    assert len(list(Path("kv-cache").rglob("*.kv"))) == 6
    with server(MODELS["mamba"], keys, **arguments) as other:
        assert other.prefetch(prompt) == len(prompt)
        assert same(other.load(prompt), computed)
