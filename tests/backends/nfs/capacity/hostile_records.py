"""Feed the largest hostile control records to their parsers, and print the memory that each takes.

python -m tests.backends.nfs.capacity.hostile_records

Each record has a right checksum, so that the parsers behind it are reached.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from offload_backend_nfs.capacity.account_state import decode
from offload_backend_nfs.capacity.control_record import DamagedRecordError, decompress, read_lines, seal, unseal

MIB = 1024 * 1024
ACCOUNT_BYTES = 8 * MIB
LINES_BYTES = 8 * MIB
PATH = f"{'ab' * 32}/p/"


def joined(parts: Iterator[str], before: str, after: str) -> bytes:
    """Return as many parts as fit into an account."""
    taken = []
    size = len(before) + len(after)
    for part in parts:
        size += len(part) + 1
        if size > ACCOUNT_BYTES - 200:
            break
        taken.append(part)
    return (before + ",".join(taken) + after).encode()


def names() -> Iterator[str]:
    return map("{:016x}".format, itertools.count())


ACCOUNTS: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: b"[" * (ACCOUNT_BYTES - 200),
    "nested objects": lambda: b'{"a":' * (ACCOUNT_BYTES // 5 - 100),
    "empty lists": lambda: joined(itertools.repeat("[]"), "[", "]"),
    "unknown fields": lambda: joined((f'"{name}":0' for name in names()), "{", "}"),
    "members": lambda: joined((f'"{name}":{{}}' for name in names()), '{"owners":{', "}}"),
    "wrong members": lambda: joined((f'"{number}":[]' for number in itertools.count()), '{"owners":{', "}}"),
    "changes": lambda: joined((f'"{name}"' for name in names()), '{"changes":[', "]}"),
    "wrong changes": lambda: joined(itertools.repeat("1"), '{"changes":[', "]}"),
    "batches": lambda: joined(
        (f'"{name}":{{"by":"","nbytes":1,"phase":"deleting"}}' for name in names()), '{"condemned":{', "}}"
    ),
    "withdrawn paths": lambda: joined(
        (f'"{PATH}{name}"' for name in names()),
        f'{{"condemned":{{"{"0" * 16}":{{"by":"","nbytes":1,"phase":"deleting","spared":[',
        "]}}}",
    ),
    "a long string": lambda: b'{"keeper":"' + b"a" * (ACCOUNT_BYTES - 200) + b'"}',
    "a long number": lambda: b'{"used_bytes":' + b"9" * (ACCOUNT_BYTES - 200) + b"}",
}
LINES: dict[str, Callable[[], bytes]] = {
    "bomb": lambda: zlib.compress(bytes(200 * MIB)),
    "empty lines": lambda: zlib.compress(b"\n" * LINES_BYTES),
    "one long line": lambda: zlib.compress(b"a" * LINES_BYTES),
    "objects": lambda: zlib.compress(
        b"".join(f"{PATH}{number:06x} 1.0\n".encode() for number in range(LINES_BYTES // 80))
    ),
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Case = tuple[str, str, str, Callable[[], bytes], Callable[[bytes], object]]
"""Its name, the record's kind and the name of its file, the maker of its body, and its parser."""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse_lines(content: bytes) -> None:
    dict(read_lines(decompress(unseal("touches", content, "0" * 16), LINES_BYTES)))


def main() -> None:
    cases: list[Case] = [(f"account: {name}", "account", "", make, decode) for name, make in ACCOUNTS.items()]
    cases += [(f"lines: {name}", "touches", "0" * 16, make, parse_lines) for name, make in LINES.items()]
    print(
        json.dumps(
            {name: mebibytes(seal(kind, make(), file_name), parse) for name, kind, file_name, make, parse in cases}
        )
    )


def mebibytes(content: bytes, parse: Callable[[bytes], object]) -> int:
    """Return the memory for one record, measured in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        before = resident_bytes()
        try:
            parse(content)
        except DamagedRecordError as error:
            os.write(writer, b"-1" if len(str(error)) > 1000 else b"")
        os.write(writer, str((peak_bytes() - before) // MIB).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return int(file.read() if not status else -1)


if __name__ == "__main__":
    main()
