"""Our tiers as a storage backend of SGLang's HiCache: SGLang's factory, prefix tree, controllers and host pools.

Each test here is a check in ``sglang/checks_*.py``. A file of checks runs once, in a process of its own.
"""

from __future__ import annotations

import pytest

from tests.elsewhere.sglang_process import names, outcomes, why_not

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.mark.parametrize(("file", "check"), [pytest.param(*name, id="-".join(name)) for name in names()])
def test_sglang(file: str, check: str) -> None:
    cases = outcomes(file).get(check)
    assert cases, f"{check} did not run"
    assert not any(cases), "\n".join(cases)
