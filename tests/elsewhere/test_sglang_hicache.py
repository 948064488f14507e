"""Our tiers as a storage backend of SGLang's HiCache: SGLang's factory, prefix tree, controllers and host pools.

Each test here is a check in ``sglang/checks_*.py``. All checks run once, in a process of their own.
"""

from __future__ import annotations

import pytest

from tests.elsewhere.sglang_process import names, outcomes, why_not

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def problems_of(file: str, check: str) -> str:
    """Return the problems of a check's cases."""
    cases = outcomes().get((file, check))
    assert cases, f"{check} did not run"
    return "\n".join(filter(None, cases))


@pytest.mark.parametrize(("file", "check"), [pytest.param(*name, id="-".join(name)) for name in names()])
def test_sglang(file: str, check: str) -> None:
    assert not problems_of(file, check)


def test_the_recipe_for_sglang_serves() -> None:
    """SGLang's own parser reads the command, and its prefix cache uses the backend that the command names."""
    assert not problems_of("checks_recipe.py", "test_the_command_of_the_document_serves")
