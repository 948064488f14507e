"""The number of random examples of a property: a part of them in `make test`, all of them in `make test-long`.

The profile is chosen on the command line: ``pytest --hypothesis-profile=thorough``.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

ALL_EXAMPLES = 200
"""Number of examples of a property that names no number of its own."""

# No time limit per example: the machine that runs the tests may be busy with an engine.
settings.register_profile("quick", deadline=None, max_examples=ALL_EXAMPLES // 4)
settings.register_profile("thorough", deadline=None, max_examples=ALL_EXAMPLES)


def examples(thorough: int, **others: Any) -> settings:
    """Return the settings of a property that gets ``thorough`` examples in the thorough profile."""
    profile = settings.default
    assert profile is not None
    return settings(max_examples=max(1, thorough * profile.max_examples // ALL_EXAMPLES), **others)
