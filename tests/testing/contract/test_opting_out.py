"""A clause is opted out of by a capability or by ``xfail`` with a reason, and in no other way."""

from __future__ import annotations

from typing import Any

import pytest

from offload_core.testing.contract.suite import BackendContract, weakened

pytest_plugins = ["pytester"]

NAME = "test_c03_a_miss_leaves_its_buffer_untouched"

FILE = """
import pytest
from offload_core.testing.contract.suite import BackendContract
from tests.testing.contract.inner_run import TestReference as Reference

{before}
class TestMine(Reference):
    pass
{after}
"""


def stub(self: BackendContract) -> None:
    pass


def skipped(self: BackendContract) -> None:
    pass


skipped.pytestmark = [pytest.mark.skip(reason="later").mark]  # type: ignore[attr-defined]


def subclass(**members: Any) -> type:
    return type("TestMine", (BackendContract,), members)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({NAME: None}, f"TestMine.{NAME} is replaced by None"),
        ({NAME: stub}, f"TestMine.{NAME} is replaced by <function stub"),
        ({NAME: "later"}, "is replaced by 'later'"),
        ({NAME: skipped}, f"TestMine.{NAME} is marked skip; "),
        ({"pytestmark": pytest.mark.skip(reason="later")}, "is marked skip; "),
        ({"pytestmark": [pytest.mark.skipif(True, reason="later")]}, "is marked skipif; "),
        ({"pytestmark": pytest.mark.xfail()}, "is marked xfail without a reason; "),
    ],
    ids=["None", "stub", "no function", "skipped", "class skipped", "class skipped if", "class xfail"],
)
def test_a_weakened_class_cannot_be_made(members: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError) as caught:
        subclass(**members)
    assert problem in str(caught.value)
    assert "opted out of by a capability that is not declared, or by pytest.mark.xfail(reason='why')" in str(
        caught.value
    )


def test_a_base_class_cannot_weaken_either() -> None:
    mixin = type("Mixin", (), {NAME: None})
    with pytest.raises(TypeError, match="is replaced by None"):
        type("TestMine", (mixin, BackendContract), {})


@pytest.mark.parametrize("reason", [None, "", "  "])
def test_an_xfail_needs_a_reason(reason: str | None) -> None:
    def test(self: BackendContract) -> None:
        pass

    mark = pytest.mark.xfail(reason=reason) if reason is not None else pytest.mark.xfail()
    with pytest.raises(TypeError, match=r"test_c03_\w+ is marked xfail without a reason"):
        subclass(**{NAME: mark(test)})


def test_an_xfail_with_a_reason_and_tests_of_ones_own_are_taken() -> None:
    def test(self: BackendContract) -> None:
        pass

    made = subclass(**{NAME: pytest.mark.xfail(reason="the server does it")(test), "test_mine": stub})
    assert weakened(made, NAME, []) is None


def test_what_is_added_after_the_class_was_made_is_seen_too() -> None:
    made = subclass()
    assert weakened(made, NAME, []) is None
    assert "is marked skipif" in (weakened(made, NAME, [pytest.mark.skipif(True, reason="").mark]) or "")
    setattr(made, NAME, stub)
    assert "is replaced by" in (weakened(made, NAME, []) or "")


def test_other_tests_may_be_skipped() -> None:
    skip = pytest.mark.skip(reason="later").mark
    assert weakened(subclass(), "test_mine", [skip]) is None
    assert weakened(dict, NAME, [skip]) is None
    assert weakened(None, NAME, [skip]) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('pytestmark = pytest.mark.skip(reason="later")', ""),
        ('@pytest.mark.skipif(True, reason="later")', ""),
        ("", f"TestMine.{NAME} = lambda self: None"),
    ],
    ids=["module skipped", "class skipped", "replaced afterwards"],
)
def test_pytest_refuses_to_run_what_was_weakened(pytester: pytest.Pytester, before: str, after: str) -> None:
    pytester.makepyfile(FILE.format(before=before, after=after))
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*TestMine.{NAME} is *; a clause is opted out of by *"])


def test_what_the_author_forgot_is_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from offload_core.testing.contract.suite import BackendContract

        class TestNothing(BackendContract):
            pass

        class TestNoType(BackendContract):
            @pytest.fixture
            def options(self):
                return {}
        """
    )
    result = pytester.runpytest_inprocess("-k", "c01")
    result.assert_outcomes(errors=10)
    result.stdout.fnmatch_lines(
        [
            "*TestNothing needs a fixture `options` that returns the tier's own keys, for a fresh medium each time*",
            "    def options(self, tmp_path):",
            "*TestNoType needs a class attribute `backend_type`, the BackendType that your plugin registers*",
            "*backend_type = BackendType(*",
        ]
    )
