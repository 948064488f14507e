"""The checks of :mod:`.checks`, in a machine with a kernel NFS server and client, which user-mode Linux makes.

Needs Debian's packages user-mode-linux, nfs-kernel-server, nfs-common, dmsetup, iproute2 and kmod, and root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SERVER_PROGRAMS = ["exportfs", "nfsdcld", "rpc.mountd", "rpc.nfsd", "rpcbind"]
PROGRAMS = [*SERVER_PROGRAMS, "dmsetup", "linux.uml", "mkfs.ext4", "modprobe", "mount.nfs", "tc"]
MODULES = Path("/usr/lib/uml/modules")
LIMIT_SECONDS = 600
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _missing() -> list[str]:
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return [*missing, *([] if MODULES.is_dir() else [str(MODULES)]), *([] if os.geteuid() == 0 else ["root"])]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.skipif(bool(_missing()), reason=f"no kernel NFS without {', '.join(_missing())}")
def test_kernel_nfs(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "modules").symlink_to(MODULES)
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(512 << 20)
    env = {**os.environ, "PATH": _PATH, "TMPDIR": "/dev/shm"}  # the machine's memory is a file there
    subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], env=env, check=True)
    repository = ROOT
    with (tmp_path / "console").open("wb") as console:
        subprocess.run(
            [
                "linux.uml", "mem=3G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet",
                f"init={Path(__file__).with_name('guest.sh')}", f"ubd0={disk}", "con=null", "con0=fd:0,fd:1",
                f"WORK={tmp_path}", f"PYTHON={sys.executable}", f"REPOSITORY={repository}",
            ],
            env=env, stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    output = tmp_path / "output"
    printed = output.read_text() if output.exists() else (tmp_path / "console").read_text(errors="replace")
    status = tmp_path / "exit-status"
    assert status.exists(), f"the machine has not run the checks to their end: {printed[-6000:]}"
    assert status.read_text().strip() == "0", printed[-6000:]
