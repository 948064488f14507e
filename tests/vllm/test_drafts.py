"""Every method of vLLM's speculative decoding has a verdict, and a method without a proof is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config.speculative import MTPModelTypes, SpeculativeConfig, SpeculativeMethod

from offload_core.api.errors import PlanError
from offload_core.vllm.model.drafts import (
    DRAFT_METHODS,
    Proved,
    draft_method,
    drafts_identity,
    lookahead_tokens,
)
from tests.support.paths import ROOT

pytestmark = pytest.mark.every_version

METHODS = get_args(SpeculativeMethod)
KINDS_OF_MTP = set(get_args(MTPModelTypes)) - {"mtp"}
WITH_CACHE = [name for name, row in DRAFT_METHODS.items() if isinstance(row, Proved) and row.has_cache]


def engine(method: str, draft_len: int = 4096, architecture: str = "DFlashDraftModel", **settings: Any) -> Any:
    """The configuration that vLLM makes of a method's name: all kinds of MTP are "mtp"."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type=method if method in KINDS_OF_MTP else "other"),
        max_model_len=draft_len,
        architectures=[architecture],
    )
    name = "mtp" if method in KINDS_OF_MTP else method
    speculation = SimpleNamespace(method=name, draft_model_config=model, num_speculative_tokens=3, **settings)
    return SimpleNamespace(speculative_config=speculation, model_config=SimpleNamespace(max_model_len=4096))


def test_every_method_of_the_installed_vllm_has_a_row() -> None:
    assert set(METHODS) - set(DRAFT_METHODS) == set()


@pytest.mark.parametrize("method", sorted({*METHODS, *DRAFT_METHODS} - {"mtp"}))
def test_a_method_passes_if_it_is_proved_and_is_refused_by_name_otherwise(method: str) -> None:
    assert draft_method(engine(method)) == method
    verdict = DRAFT_METHODS[method]
    if isinstance(verdict, Proved):
        assert lookahead_tokens(engine(method)) == verdict.lookahead_tokens
        return
    with pytest.raises(PlanError, match=rf"the method '{method}' .*; run without speculative_config, or .*: ngram"):
        lookahead_tokens(engine(method))
    assert drafts_identity(engine(method)) == {}


@pytest.mark.parametrize("method", sorted({*METHODS, *DRAFT_METHODS} - {"mtp"}))
def test_a_method_reads_ahead_if_vllm_says_so(method: str) -> None:
    verdict = DRAFT_METHODS[method]
    if isinstance(verdict, Proved):
        says = SimpleNamespace(method="mtp" if method in KINDS_OF_MTP else method)
        reads_ahead = SpeculativeConfig.use_eagle(says) and method != "dflash"  # it reads the target's states only
        assert bool(verdict.lookahead_tokens) == reads_ahead


@pytest.mark.parametrize("method", ["a_newer_method", "mtp"])
def test_a_method_that_a_newer_vllm_adds_is_refused(method: str) -> None:
    with pytest.raises(PlanError, match=r"the method '(a_newer_method|other)' is not known"):
        lookahead_tokens(engine(method))


def test_an_engine_without_drafts_passes() -> None:
    none: Any = SimpleNamespace(speculative_config=None)
    assert draft_method(none) is None
    assert lookahead_tokens(none) == 0
    assert drafts_identity(none) == {}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"disable_eagle_block_drop": True}, "disable_eagle_block_drop is True, .* other prompts.*; leave it out"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab is True"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 2)]}, r"num_speculative_tokens_per_batch_size is \[\(1"),
        ({"use_multi_module_mtp": lambda: True}, "num_speculative_tokens is 3, .* set it to 1"),
        ({"draft_len": 2048}, "drafts end at 2048 tokens, but max_model_len is 4096.*set max_model_len to 2048"),
    ],
)
@pytest.mark.parametrize("method", WITH_CACHE)
def test_a_setting_that_is_not_proved_is_refused(method: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        lookahead_tokens(engine(method, **settings))


@pytest.mark.parametrize("method", [method for method in WITH_CACHE if method != "dflash"])
def test_drafts_all_at_once_are_refused_except_for_dflash(method: str) -> None:
    with pytest.raises(PlanError, match=r"parallel_drafting is True, .* not proved .*; leave it out"):
        lookahead_tokens(engine(method, parallel_drafting=True))
    assert lookahead_tokens(engine("dflash", parallel_drafting=True)) == 0


def test_other_architectures_of_dflash_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the draft model is a DFlash2DraftModel, .*; take a DFlashDraftModel"):
        lookahead_tokens(engine("dflash", architecture="DFlash2DraftModel"))


def test_drafts_without_a_cache_may_have_any_setting() -> None:
    assert lookahead_tokens(engine("ngram", draft_len=1, parallel_drafting=True)) == 0


def test_a_cache_of_drafts_is_part_of_the_identity() -> None:
    assert drafts_identity(engine("ngram")) == {}
    identities = [drafts_identity(engine(method)) for method in WITH_CACHE]
    assert all(identities)
    assert len({repr(identity) for identity in identities}) == len(WITH_CACHE)


def table() -> Iterator[str]:
    """The rows of the table in docs/models.md; neighbours with one verdict share a row."""
    for verdict, methods in groupby(DRAFT_METHODS, key=DRAFT_METHODS.__getitem__):
        text = f"proved: {verdict.text}" if isinstance(verdict, Proved) else f"refused: it {verdict.reason}"
        yield f"| {', '.join(f'`{method}`' for method in methods)} | {text} |"


def test_the_document_has_the_table() -> None:
    rows = "\n".join(["| method | offloading |", "|---|---|", *table()])
    assert rows in (ROOT / "docs" / "models.md").read_text(), f"write this table into docs/models.md:\n{rows}"
