"""Every method of vLLM's speculative decoding has a verdict, and a method without a proof is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

from offload_core.api.errors import PlanError
from offload_core.vllm.model.drafts import DRAFT_METHODS, Proved, draft_method, refuse_unproved_drafts
from tests.support.paths import ROOT

pytestmark = pytest.mark.every_version

METHODS = get_args(SpeculativeMethod)
KINDS_OF_MTP = set(get_args(MTPModelTypes)) - {"mtp"}


def engine(method: str) -> Any:
    """The configuration that vLLM makes of a method's name: all kinds of MTP are "mtp"."""
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=method if method in KINDS_OF_MTP else "other"))
    name = "mtp" if method in KINDS_OF_MTP else method
    return SimpleNamespace(speculative_config=SimpleNamespace(method=name, draft_model_config=model))


def test_every_method_of_the_installed_vllm_has_a_row() -> None:
    assert set(METHODS) - set(DRAFT_METHODS) == set()


@pytest.mark.parametrize("method", sorted({*METHODS, *DRAFT_METHODS} - {"mtp"}))
def test_a_method_passes_if_it_is_proved_and_is_refused_by_name_otherwise(method: str) -> None:
    assert draft_method(engine(method)) == method
    if isinstance(DRAFT_METHODS[method], Proved):
        refuse_unproved_drafts(engine(method))
        return
    with pytest.raises(PlanError, match=rf"the method '{method}' .*; run without speculative_config, or .*: ngram"):
        refuse_unproved_drafts(engine(method))


@pytest.mark.parametrize("method", ["a_newer_method", "mtp"])
def test_a_method_that_a_newer_vllm_adds_is_refused(method: str) -> None:
    with pytest.raises(PlanError, match=r"the method '(a_newer_method|other)' is not known"):
        refuse_unproved_drafts(engine(method))


def test_an_engine_without_drafts_passes() -> None:
    none: Any = SimpleNamespace(speculative_config=None)
    assert draft_method(none) is None
    refuse_unproved_drafts(none)


def table() -> Iterator[str]:
    """The rows of the table in docs/models.md; neighbours with one verdict share a row."""
    for verdict, methods in groupby(DRAFT_METHODS, key=DRAFT_METHODS.__getitem__):
        text = f"proved: {verdict.text}" if isinstance(verdict, Proved) else f"refused: it {verdict.reason}"
        yield f"| {', '.join(f'`{method}`' for method in methods)} | {text} |"


def test_the_document_has_the_table() -> None:
    rows = "\n".join(["| method | offloading |", "|---|---|", *table()])
    assert rows in (ROOT / "docs" / "models.md").read_text(), f"write this table into docs/models.md:\n{rows}"
