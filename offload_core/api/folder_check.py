"""The check of an option that names a folder, for backends: it never waits for a file system that hangs."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from pathlib import Path

_LOOK_SECONDS = 2.0


def check_folder(folder: Path, cure: str) -> None:
    """Refuse a folder that cannot be used: something else has its name, or it is not there and nor is its parent.

    One whose file system does not answer soon is let pass: it hangs, which is seen again, under a deadline, when the
    tier is opened.

    Args:
        cure: what to do where the parent is missing.

    Raises:
        ValueError: with the folder, what is wrong with it, and the cure.
    """
    answer: Future[tuple[bool, bool, bool]] = Future()

    def look() -> None:
        try:
            answer.set_result((folder.exists(), folder.is_dir(), folder.parent.is_dir()))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=look, name=f"look at {folder}", daemon=True).start()
    wait([answer], timeout=_LOOK_SECONDS)
    if not answer.done():
        return
    try:
        exists, is_folder, has_parent = answer.result()
    except OSError as error:
        raise ValueError(f"{error}; name a folder that this process may use") from error
    if exists and not is_folder:
        raise ValueError(f"{folder} is a file; name a folder")
    if not exists and not has_parent:
        raise ValueError(f"the parent folder {folder.parent} does not exist; {cure}")
