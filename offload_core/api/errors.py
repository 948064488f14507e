"""The exceptions of offload-core. Each one inherits the built-in exception that it resembles.

::

    OffloadError
    ├── ConfigError(ValueError)             a configuration that cannot work, with every problem in it
    ├── PlanError(ValueError)               the model's group geometry and the chunk size do not fit together
    ├── UnsupportedLayoutError(ValueError)  a KV cache tensor that cannot be divided into blocks of bytes
    ├── ObjectFormatError(ValueError)       bytes from a medium that are not the expected object
    ├── PluginError(ImportError)            a plugin that the configuration needs could not be loaded, or failed
    └── BackendError(OSError)               a storage medium failed for a whole batch

Normal outcomes (a miss, a rejected store) are values, not exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from offload_core.api.checks.credentials import without_credentials

_MAX_COMPARED = 100
"""The most characters of a word that are compared with valid words, which takes time with their square."""


class OffloadError(Exception):
    """Base of every exception that offload-core raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """The configuration cannot work.

    Args:
        problems: one entry per problem; all of them are found before the error is raised. Credentials in URLs are
            masked.
        source: the place of the configuration, for the first line of the message.
    """

    def __init__(self, problems: Sequence[str], source: str = "kv_connector_extra_config") -> None:
        self.problems = tuple(map(without_credentials, problems))
        self.source = without_credentials(source)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"{count} in {self.source}:", *(f"  - {problem}" for problem in self.problems)]))


class PlanError(OffloadError, ValueError):
    """The group geometry and ``hybrid_chunk_size`` do not fit together; the message holds a working value."""


class UnsupportedLayoutError(OffloadError, ValueError):
    """A layer's KV cache tensor has a layout that cannot be divided into pages of bytes, one per block."""


class ObjectFormatError(OffloadError, ValueError):
    """Stored bytes are not the expected object: damaged, truncated, or of another key or version."""


class PluginError(OffloadError, ImportError):
    """A plugin that the configuration needs could not be loaded, or one of its hooks failed."""


class BackendError(OffloadError, OSError):
    """A storage medium failed for a whole batch. A backend may raise this or any other ``OSError``.

    The core turns it into a miss of each key of a load, and into a failed store of each key of a store.
    """


def text_of(error: BaseException) -> str:
    """Return the text of an error. The classes of plugins and of their libraries may fail to make one."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be read"


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for a message about ``word``, or nothing when no valid word resembles it."""
    close = closest(word, valid)
    return f" (did you mean {close!r}?)" if close is not None else ""


def closest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that resembles ``word`` most, or ``None``."""
    return next(iter(difflib.get_close_matches(word[:_MAX_COMPARED], list(valid), n=1)), None)
