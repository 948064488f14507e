"""The contract's tests on the reference backend and on each broken one; ``test_teeth.py`` has pytest run them.

The file's name keeps pytest from collecting it by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.suite import BackendContract
from tests.testing.contract.broken import BROKEN
from tests.testing.contract.reference import MEDIA, REFERENCE


class TestReference(BackendContract):
    backend_type = REFERENCE
    largest_object_bytes = 1024 * 1024

    @pytest.fixture
    def options(self) -> Iterator[dict[str, Any]]:
        medium = secrets.token_hex(8)
        yield {"medium": medium}
        MEDIA.pop(medium, None)

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        found = MEDIA[options["medium"]].objects[key]
        found.content = found.content[: len(found.content) // 2]


def class_name(index: int) -> str:
    """Return the test class of ``BROKEN[index]``."""
    return f"TestBroken{index}"


globals().update(
    {
        class_name(index): type(class_name(index), (TestReference,), {"backend_type": broken.backend_type})
        for index, broken in enumerate(BROKEN)
    }
)
