"""Duration of the disk backend's scan of an unregistered folder, and of the calls during the scan.

python -m benchmarks.disk_scan FOLDER [--objects 1000000] [--json FILE]

The benchmark makes empty objects below FOLDER; each needs an inode and no room. It opens a tier with a capacity on
them, as the first engine does, and calls the tier until the scan has ended. Then it deletes the objects. The memory is
that of this process, which runs the tier.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import offload_backend_disk.folder.files as disk_files
from offload_backend_disk import DiskBackend, DiskOptions

from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import CallsDuringScan, DiskScan, Scan, percentile
from offload_core.api.backend import BackendContext, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor

NAMESPACE = "ab" * 32
PACK = "full-u256"
BATCH = 64
PAUSE_SECONDS = 0.02


def make_objects(root: Path, count: int) -> None:
    """Make empty objects at the paths of their keys."""
    folders = [root / NAMESPACE / PACK / f"{prefix:02x}" for prefix in range(256)]
    for folder in folders:
        disk_files.make_private_folder(folder)
    for number in range(count):
        digest = hashlib.sha256(number.to_bytes(8, "big")).hexdigest()
        os.close(os.open(f"{folders[int(digest[:2], 16)]}/{digest}.kv", os.O_CREAT | os.O_WRONLY, 0o600))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measure(root: Path) -> tuple[float, float, list[float], list[float], int]:
    """Return the seconds of open, of the scan and of each contains and prepare_store meanwhile, and bytes of memory."""
    executor = DaemonExecutor(4, "disk")
    options = DiskOptions.model_validate({"path": root, "capacity": "1TiB"})
    backend = DiskBackend(options, BackendContext("disk", executor))
    keys = [ObjectKey(NAMESPACE, PACK, hashlib.sha256(b"new %d" % number).digest()) for number in range(BATCH)]
    before_bytes, most_bytes = resident_bytes(), 0
    started = time.perf_counter()
    await backend.open()
    open_seconds = time.perf_counter() - started
    lookups: list[float] = []
    reservations: list[float] = []
    known = False
    while not known:
        begun = time.perf_counter()
        await backend.contains(keys)
        looked = time.perf_counter()
        reservation = await backend.prepare_store(keys, [1] * BATCH)
        reservations.append(time.perf_counter() - looked)
        lookups.append(looked - begun)
        known = StoreOutcome.REJECTED not in reservation.outcomes
        await reservation.release()
        most_bytes = max(most_bytes, resident_bytes())
        if not known:
            await asyncio.sleep(PAUSE_SECONDS)
    scan_seconds = time.perf_counter() - started
    await backend.close()
    executor.shutdown()
    return open_seconds, scan_seconds, lookups, reservations, most_bytes - before_bytes


def calls_of(operation: str, seconds: list[float]) -> CallsDuringScan:
    p50, p90, p99 = (1000 * percentile(seconds, percent) for percent in (50, 90, 99))
    return CallsDuringScan(
        operation=operation,
        keys=BATCH,
        samples=len(seconds),
        first_ms=1000 * seconds[0],
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=1000 * max(seconds),
    )


def show(scan: Scan, calls: list[CallsDuringScan]) -> None:
    print(f"open: {scan.open_ms:.1f} ms; the scan ended after {scan.scan_seconds:.1f} s")
    for row in calls:
        print(
            f"{row.operation} of {row.keys} keys during the scan, {row.samples} calls: first {row.first_ms:.1f}, "
            f"p50 {row.p50_ms:.1f}, p90 {row.p90_ms:.1f}, p99 {row.p99_ms:.1f}, max {row.max_ms:.1f} ms"
        )
    print(f"memory: {scan.memory_mib:.1f} MiB more than before; account on disk: {scan.account_mib:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder to work in, on the disk to measure; made if missing, no object is left there"
    )
    parser.add_argument("--objects", type=int, default=1_000_000, help="number of objects to make")
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="disk-scan-", dir=arguments.folder))
    try:
        started = time.perf_counter()
        make_objects(root, arguments.objects)
        made_seconds = time.perf_counter() - started
        print(f"made {arguments.objects:,} objects in {made_seconds:.1f} s", flush=True)
        opened, scanned, lookups, reservations, memory_bytes = asyncio.run(measure(root))
        account = sum(path.stat().st_size for path in (root / ".offload-core").glob("account.sqlite*"))
    finally:
        shutil.rmtree(root)
    scan = Scan(
        objects=arguments.objects,
        make_seconds=made_seconds,
        open_ms=1000 * opened,
        scan_seconds=scanned,
        memory_mib=memory_bytes / 2**20,
        account_mib=account / 2**20,
    )
    calls = [calls_of("contains", lookups), calls_of("prepare_store", reservations)]
    show(scan, calls)
    run.write(DiskScan(scan=[scan], calls=calls))


if __name__ == "__main__":
    main()
