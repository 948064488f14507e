"""The exceptions of offload-core, each inheriting the built-in it resembles.

::

    OffloadError
    ├── ConfigError(ValueError)             what the operator wrote cannot work; carries every problem found
    ├── PlanError(ValueError)               the model's group geometry and the chunk size do not fit together
    ├── UnsupportedLayoutError(ValueError)  a KV cache tensor whose bytes we cannot name block by block
    ├── ObjectFormatError(ValueError)       bytes from a medium that are not the object they should be
    ├── PluginError(ImportError)            a plugin that the configuration needs could not be loaded, or failed
    └── BackendError(OSError)               a storage medium failed for a whole batch

Outcomes that are part of normal life (a miss, a rejected store) are values, not exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class OffloadError(Exception):
    """Base of every exception that offload-core raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """The configuration cannot work. ``problems`` holds one entry per problem, all of them at once."""

    def __init__(self, problems: Sequence[str], source: str = "kv_connector_extra_config") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"{count} in {source}:", *(f"  - {problem}" for problem in self.problems)]))


class PlanError(OffloadError, ValueError):
    """The group geometry and ``hybrid_chunk_size`` do not fit together; the message holds a working value."""


class UnsupportedLayoutError(OffloadError, ValueError):
    """A layer's KV cache tensor has a layout whose blocks cannot be named as byte pages."""


class ObjectFormatError(OffloadError, ValueError):
    """Stored bytes are not the object they should be: damaged, truncated, or of another key or version."""


class PluginError(OffloadError, ImportError):
    """A plugin that the configuration needs could not be loaded, or one of its hooks failed."""


class BackendError(OffloadError, OSError):
    """A storage medium failed for a whole batch. Raised by backends, turned into misses by the core."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for a message about ``word``, or nothing when no known word resembles it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
