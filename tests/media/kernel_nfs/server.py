"""The kernel's NFS server and client on one machine, and what befalls both. For root on a machine of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

_EXPORT, _MOUNT, _DISK = Path("/mnt/export"), Path("/mnt/nfs"), "/dev/ubda"
_LEASE_SECONDS = "10"


class KernelNfs:
    """A server whose disk can hang, reached through the loopback, which can be cut."""

    def __init__(self) -> None:
        _EXPORT.mkdir()
        _MOUNT.mkdir()
        state = Path("/var/lib/nfs")
        for folder in ("sm", "sm.bak", "v4recovery", "rpc_pipefs", "nfsdcld"):
            (state / folder).mkdir()
        for file in ("etab", "rmtab", "state"):
            (state / file).touch()
        Path("/run/rpcbind").mkdir()
        _run("mount", "-t", "rpc_pipefs", "rpc_pipefs", str(state / "rpc_pipefs"))
        _run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")

        sectors = _run("blockdev", "--getsz", _DISK).strip()
        _run("dmsetup", "create", "store", "--noudevsync", "--table", f"0 {sectors} linear {_DISK} 0")
        _run("dmsetup", "mknodes")
        _run("mount", "-t", "ext4", "/dev/mapper/store", str(_EXPORT))

        _run("rpcbind", "-w")
        for name in ("nfsv4gracetime", "nfsv4leasetime"):
            Path("/proc/fs/nfsd", name).write_text(_LEASE_SECONDS)
        _run("nfsdcld", "-s", str(state / "nfsdcld"))
        _run("exportfs", "-o", "rw,sync,no_root_squash,no_subtree_check,fsid=0", f"127.0.0.1:{_EXPORT}")
        _run("rpc.mountd", "-p", "20048")
        _run("rpc.nfsd", "4")
        self._hangs = self._is_cut = False

    def mount(self, version: str) -> Path:
        """Mount it ``hard``, so that calls wait for the server for ever; returns an empty folder there."""
        source, more = (f"127.0.0.1:{_EXPORT}", ",nolock") if version == "3" else ("127.0.0.1:/", "")
        _run("mount", "-t", "nfs", "-o", f"vers={version},proto=tcp,hard{more}", source, str(_MOUNT))
        folder = _MOUNT / f"v{version}-{len(list(_MOUNT.iterdir()))}"
        folder.mkdir()
        return folder

    def unmount(self) -> None:
        _run("umount", str(_MOUNT))

    def hang_disk(self) -> None:
        """From now on the server waits for its disk, whatever it is asked for; connections stay alive."""
        Path("/proc/sys/vm/drop_caches").write_text("3")
        _run("dmsetup", "suspend", "--noudevsync", "--nolockfs", "store")
        self._hangs = True

    def cut_network(self) -> None:
        """From now on each packet is lost."""
        Path("/proc/sys/vm/drop_caches").write_text("3")
        _run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "100%")
        self._is_cut = True

    def recover(self) -> None:
        """Let disk and network work again. Harmless when they do."""
        if self._hangs:
            _run("dmsetup", "resume", "--noudevsync", "store")
        if self._is_cut:
            _run("tc", "qdisc", "del", "dev", "lo", "root")
        self._hangs = self._is_cut = False


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
    return done.stdout
