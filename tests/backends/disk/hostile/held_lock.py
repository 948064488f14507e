"""A process that takes a lock of a folder, says so, and is stopped with SIGSTOP.

python held_lock.py STATE_FOLDER transaction|opening|scanning
"""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import sys


def main(folder: str, lock: str) -> None:
    if lock == "transaction":
        sql = sqlite3.connect(f"{folder}/account.sqlite", isolation_level=None)
        sql.execute("BEGIN IMMEDIATE")
    else:
        fcntl.flock(os.open(f"{folder}/{lock}", os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
