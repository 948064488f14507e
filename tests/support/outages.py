"""Folders that are taken away from running backends, and brought back."""

from __future__ import annotations

from pathlib import Path


def move_away(folder: Path) -> None:
    """Rename a folder, so that nothing has its name."""
    folder.rename(_place_of(folder))


def leave_bare_mount_point(folder: Path) -> None:
    """Leave an empty folder, as an unmount does."""
    move_away(folder)
    folder.mkdir()


def bring_back(folder: Path) -> None:
    """Undo one of the functions above.

    Raises:
        OSError: something was written below the bare mount point.
    """
    if folder.exists():
        folder.rmdir()
    _place_of(folder).rename(folder)


def _place_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-away")
