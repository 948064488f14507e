"""What the code produces is what its golden file holds, and there is no file that nothing produces."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_core.objects.format import ENCRYPTED_VERSION
from tests.golden import objects, subject
from tests.golden.documents import DOCUMENTS, OBJECTS, produced
from tests.golden.masks import DATA


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_produced_now_is_what_the_file_holds(name: str, tmp_path: Path) -> None:
    now = produced(DOCUMENTS[name], tmp_path).decode()
    assert now == (DATA / name).read_text(), f"{name} has changed; where that is meant, see tests/golden/__init__.py"


def test_every_file_is_compared_with_something() -> None:
    versions = {*range(1, subject.FORMAT_VERSION), ENCRYPTED_VERSION}
    others = {objects.golden_object("none", version).name for version in versions}
    assert {path.name for path in DATA.iterdir()} == {*DOCUMENTS, *OBJECTS, *others}
