"""Put the system libraries that Mooncake's wheel lacks beside those that it brings, without root.

The wheel links libibverbs (and libnuma), which no wheel brings. Where the system lacks them, this unpacks their Debian
packages into the wheel's own folder of libraries, where it looks first. Tests that need Mooncake are skipped where that
does not work either; this script then only says so.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DISTRIBUTION = "mooncake-transfer-engine-non-cuda"
PACKAGES = {
    "libibverbs.so.1": ("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    "libnuma.so.1": ("libnuma1",),
}
"""The Debian packages that provide a library, with those that it needs itself."""


def main() -> None:
    """Unpack the packages of missing libraries, or say why not."""
    packages = [package for library, found in PACKAGES.items() if not loads(library) for package in found]
    if not packages:
        return
    try:
        unpack(packages, folder_of_libraries())
    except (OSError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError) as error:
        needed = " ".join(packages)
        print(f"The tests on Mooncake will be skipped; run: apt-get install {needed} ({error})", file=sys.stderr)


def loads(library: str) -> bool:
    """Return whether the system has a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def folder_of_libraries() -> Path:
    """Return the folder in which the wheel's modules and programs look for libraries."""
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    return Path(str(distribution.locate_file(f"{DISTRIBUTION.replace('-', '_')}.libs")))


def unpack(packages: list[str], target: Path) -> None:
    """Download Debian packages and copy their shared libraries into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", *packages], cwd=folder, check=True, capture_output=True, timeout=300)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, f"{folder}/root"], check=True, capture_output=True)
        for library in Path(folder, "root").rglob("lib*.so.*"):
            if library.is_symlink():  # it has the name that other libraries look for
                shutil.copy(library, target / library.name)


if __name__ == "__main__":
    main()
