"""The files of a model's folder that can decide the bytes of its KV cache."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

_MAX_ENTRIES = 100_000

# A short list of harmless files, so that a file of an unknown kind counts. The tokenizer's files count, because some
# multimodal models tokenize texts within the model.
_IGNORED_FOLDERS = frozenset({".git", ".cache", "__pycache__", "lost+found"})
_IGNORED_FILES = re.compile(
    r"(readme|licen[cs]e|notice|\.gitattributes|\.gitignore|\.gitkeep|\.ds_store)(\.txt)?"
    r"|.*\.(md|rst|pdf|png|jpe?g|gif|svg|webp|log|jinja)"
    r"|chat_template\.json|generation_config\.json",
    re.IGNORECASE,
)
_TIER_MARKER = ".offload-core"
"""Start of the names by which a tier marks its folder."""


@dataclass(frozen=True)
class ModelFiles:
    """The entries of a folder that count, by their names relative to it (POSIX)."""

    files: dict[str, Path] = field(default_factory=dict)
    """Regular files, also those behind links."""
    others: dict[str, str] = field(default_factory=dict)
    """Entries without content, each with its kind: a dead link, a pipe, another name of a folder."""


def model_files(folder: Path) -> ModelFiles:
    """Return the files in ``folder`` and below that can decide the bytes of a KV cache.

    All files count but a short list: documents, images, logs, chat templates, sampling defaults, and the folders of
    git, caches and tiers. Links are followed. Each folder is entered once, so links that form a loop end.

    Raises:
        OSError: a folder cannot be read, or there are more than 100,000 entries.
    """
    found = ModelFiles()
    pending = deque([("", folder)])
    entered = {_inode(folder.stat()): ""}
    while pending:
        prefix, place = pending.popleft()
        names = sorted(os.listdir(place))  # noqa: PTH208 - a name is all that is needed
        if prefix and any(name.startswith(_TIER_MARKER) for name in names):
            continue
        for name in names:
            path, relative = place / name, prefix + name
            try:
                status = path.stat()
            except OSError as error:
                if not path.is_symlink():
                    raise
                found.others[relative] = f"dead link: {errno.errorcode.get(error.errno or 0)}"
                continue
            if stat.S_ISDIR(status.st_mode):
                if name in _IGNORED_FOLDERS:
                    continue
                first = entered.setdefault(_inode(status), relative)
                if first == relative:
                    pending.append((f"{relative}/", path))
                else:
                    found.others[relative] = f"folder: {first}"
            elif stat.S_ISREG(status.st_mode):
                if not _IGNORED_FILES.fullmatch(name):
                    found.files[relative] = path
            else:
                found.others[relative] = f"no file: {stat.S_IFMT(status.st_mode):o}"
            if len(entered) + len(found.files) + len(found.others) > _MAX_ENTRIES:
                raise OSError(f"{folder} has more than {_MAX_ENTRIES} files; a model's folder should have fewer")
    return found


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
