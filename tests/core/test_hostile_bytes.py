"""Random and mutated bytes for every parser of the core: values, or an error with one of the project's own names.

:data:`PARSERS` is the one list of the parsers. A module of the core that decodes bytes must be in it or in
:data:`OWN_BYTES`; a test compares both with the sources.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_core.api import events
from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.errors import ConfigError, ObjectFormatError, OffloadError
from offload_core.api.keys import ObjectKey
from offload_core.cli.metrics_text import read_samples
from offload_core.config.geometry_file import load_geometry
from offload_core.config.loading import load_config
from offload_core.io_process import protocol
from offload_core.io_process.protocol import Kind, Piece, ProtocolError
from offload_core.objects import compression
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES, Codec
from offload_core.simulation.trace import read_trace
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.storage import StoreEnd
from tests.support.paths import ROOT
from tests.support.random_examples import examples

KEY = ObjectKey("ab" * 32, "full-u256", b"\x07" * 32)
RAW_BYTES = 3000
MAX_SECONDS = 2.0
"""Processor time that a parser may take for a few kilobytes."""
MAX_GROWTH_MIB = 128
"""Growth of the process's largest memory within all calls of a parser. Hypothesis grows too, between the calls."""


class Parser(NamedTuple):
    """A parser of bytes that the process did not write itself, or that may be damaged.

    Args:
        modules: the modules of ``offload_core`` that decode.
        samples: good inputs, to be mutated.
        parse: gets the bytes and a folder for a file.
        errors: the errors that bad bytes may raise.
        repaired: makes mutated bytes pass the outermost checksum, so that inner checks see them.
    """

    modules: tuple[str, ...]
    samples: tuple[bytes, ...]
    parse: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...]
    repaired: Callable[[bytes], bytes] = bytes


def sealed(codec: Codec) -> bytes:
    view = memoryview(bytearray(object_format.object_bytes(RAW_BYTES)))
    view[HEADER_BYTES:] = (b"\x01\x00\x02\x00" * RAW_BYTES)[:RAW_BYTES]
    object_format.seal(view, KEY)
    if codec is Codec.NONE:
        return bytes(view)
    target = memoryview(bytearray(compression.largest_compressed_bytes(len(view))))
    nbytes = compression.compress(object_format.read_header(view, KEY), view, target, codec, 1)
    assert nbytes is not None
    return bytes(target[:nbytes])


def with_right_checksums(data: bytes) -> bytes:
    """Return an object whose header and checksums say what its bytes are, as an attacker would write it."""
    if len(data) < HEADER_BYTES:
        return data
    changed = bytearray(data)
    stored_at = 8 + 2 + 1 + 1 + 1 + 3 + 32 + 64 + 64 + 8
    changed[stored_at : stored_at + 8] = (len(data) - HEADER_BYTES).to_bytes(8, "little")
    changed[stored_at + 8 : stored_at + 24] = object_format.checksum(memoryview(changed)[HEADER_BYTES:])
    changed[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(changed[: HEADER_BYTES - 16])
    return bytes(changed)


def parse_object(data: bytes, folder: Path) -> None:
    view = memoryview(data)
    target = memoryview(bytearray(object_format.object_bytes(RAW_BYTES)))
    with contextlib.suppress(ObjectFormatError):
        compression.restore(view, target, KEY)
    compression.verify_any(view, KEY)
    if object_format.read_header(view, KEY).codec is Codec.NONE:
        object_format.verify(view, KEY)


def file_parser(name: str, parse: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def write_and_parse(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return parse(path)

    return write_and_parse


def message_reader(kind: str, read: Callable[[protocol.Reader], object]) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        return read(protocol.Reader(protocol.parse(data).body))

    parse.__name__ = kind
    return parse


def message(body: bytes) -> bytes:
    return protocol.message(Kind.LOAD, 1, 2, body)


CONFIG = {
    "hybrid_chunk_size": 256,
    "load_timeout_seconds": "30s",
    "backends": [
        {"name": "a", "type": "nfs", "url": "memory://x", "capacity": "1GiB", "storage_options": {"anon": True}},
        {"name": "b", "type": "cpu", "capacity": 1048576, "load_weight": 2.5},
    ],
}
YAML = b"a: &a {name: a, type: cpu, capacity: 1MiB}\nbackends:\n  - *a\n  - {<<: *a, name: b}\nt: 2001-12-14\n"
TOML = b'load_timeout_seconds = 0x1f\nt = 1979-05-27\n[[backends]]\nname = "a"\ntype = "cpu"\ncapacity = 1_000\n'
GEOMETRY = (ROOT / "examples/geometries/gemma-3-4b.yaml").read_bytes()
TRACE = b"".join(
    json.dumps(line).encode() + b"\n"
    for line in (
        {"format": "offload-core trace", "version": 1, "block_tokens": 256},
        {"timestamp": 3, "input_length": 700, "output_length": 12, "hash_ids": [0, 17]},
        {"timestamp": 4, "input_length": 256, "output_length": 12, "hash_ids": [0]},
    )
)
KEYS, PIECES = [KEY, KEY._replace(pack="state")], [Piece(1, 2, 3, True, False)] * 2
EVENT = protocol.pack_event(events.ObjectsDamaged("tier", (KEY,)))
METRICS = b'# TYPE vllm:x counter\nvllm:x_total{tier="a",le="+Inf"} 1.5e3 123\n# EOF\n'

PARSERS: Mapping[str, Parser] = {
    "object": Parser(
        ("objects/format.py", "objects/codecs.py"),
        tuple(map(sealed, Codec)),
        parse_object,
        (ObjectFormatError,),
        with_right_checksums,
    ),
    "YAML configuration": Parser(
        ("config/file.py",),
        (YAML, json.dumps(CONFIG).encode()),
        file_parser("c.yaml", lambda path: load_config({"config_file": str(path)})),
        (ConfigError,),
    ),
    "JSON configuration": Parser(
        ("config/file.py",),
        (json.dumps(CONFIG).encode(),),
        file_parser("c.json", lambda path: load_config({"config_file": str(path)})),
        (ConfigError,),
    ),
    "TOML configuration": Parser(
        ("config/file.py",),
        (TOML,),
        file_parser("c.toml", lambda path: load_config({"config_file": str(path)})),
        (ConfigError,),
    ),
    "geometry file": Parser(
        ("config/file.py",), (GEOMETRY,), file_parser("g.yaml", lambda path: load_geometry(path)), (ConfigError,)
    ),
    "trace": Parser(("simulation/trace.py",), (TRACE,), file_parser("t.jsonl", read_trace), (ConfigError,)),
    "compressed trace": Parser(
        ("simulation/trace.py",), (gzip.compress(TRACE),), file_parser("t.jsonl.gz", read_trace), (ConfigError,)
    ),
    "request of the I/O process": Parser(
        ("io_process/protocol.py",),
        (message(protocol.pack_keys(KEYS) + protocol.pack_pieces(PIECES)),),
        message_reader("request", lambda body: body.pieces(len(body.keys()))),
        (ProtocolError,),
    ),
    "answer of the I/O process": Parser(
        ("io_process/protocol.py",),
        (
            message(
                protocol.pack_loaded(LoadEnd([LoadOutcome.HIT] * 2, 5, 1))
                + protocol.pack_stored([StoreEnd(StoreOutcome.STORED, 7)] * 2)
                + protocol.pack_change(-1)
            ),
        ),
        message_reader("answer", lambda body: (body.loaded(2), body.stored(2), body.change())),
        (ProtocolError,),
    ),
    "error of the I/O process": Parser(
        ("io_process/protocol.py",),
        (
            message(protocol.pack_error(OSError(5, "broken"))),
            message(protocol.pack_error(ConfigError(["a", "b"]))),
            message(protocol.pack_error(ZeroDivisionError("x"))),
        ),
        message_reader("error", lambda body: str(body.error())),
        (ProtocolError,),
    ),
    "event of the I/O process": Parser(
        ("io_process/protocol.py",),
        (message(EVENT), message(protocol.pack_event(events.LoadsEnded("tier", 1, 1, 2, 3, 4, 0.5)))),
        message_reader("event", lambda body: body.event()),
        (ProtocolError,),
    ),
    "metrics": Parser(
        ("cli/metrics_text.py",),
        (METRICS,),
        file_parser("metrics.txt", lambda path: read_samples(str(path))),
        (ConfigError,),
    ),
}

OWN_BYTES: Mapping[str, str] = {
    "runtime/message_ring.py": "frames in memory: tests/core/runtime/test_message_ring.py damages them",
    "runtime/companion_child.py": "the parent process wrote it into the child's standard input",
    "io_process/life/memory_use.py": "the kernel tells of a lock",
    "io_process/serving/server.py": "the engine's process wrote it into the socket between the two",
    "io_process/control.py": "the engine's processes wrote it into the socket between them",
    "io_process/life/meeting_point.py": "the kernel wrote it",
    "cli/proof/engines.py": "the command's own child process wrote it into the command's private folder",
    "vllm/proof_run.py": "the parent process wrote it into its private folder",
    "objects/kept_digests.py": "this user's own file: tests/core/objects/test_kept_digests.py damages it",
    "testing/faults/journal.py": "a test's own processes wrote it; a fault script itself is arguments, no bytes",
}
"""Modules that decode only bytes of this program or the kernel, with the reason."""

_DECODERS = re.compile(
    r"json\.loads?\(|unpack(_from)?\(|SafeLoader|tomllib\.|ZstdDecompressor\(|gzip\.open|validate_json|"
    r"pickle\.|marshal\.|text_string_to_metric"
)

PIECES_OF_TEXT = (
    *(b"{", b"[", b'"', b"\\u0000", b"\\ud800", b"1e999", b"-", b"0x", b"*a", b"&a", b"!!", b"\0"),
    b"9" * 5000,
)


def mutated(sample: bytes) -> st.SearchStrategy[bytes]:
    copied = st.integers(0, len(sample)).map(lambda at: sample[at : at + 40])
    change = st.tuples(
        st.integers(0, max(len(sample) - 1, 0)),
        st.integers(0, 8),
        st.binary(max_size=8) | st.sampled_from(PIECES_OF_TEXT) | copied,
    )

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = sample
        for place, removed, added in changes:
            data = data[:place] + added + data[place + removed :]
        return data

    cut = st.integers(0, len(sample)).map(lambda end: sample[:end])
    return st.lists(change, min_size=1, max_size=4).map(apply) | cut


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(name: str, folder: Path, data: bytes) -> int:
    """Give bytes to a parser; returns the growth of the process's largest memory meanwhile, in KiB."""
    parser = PARSERS[name]
    growth = 0
    for given_bytes in {data, parser.repaired(data)}:
        before, began = peak_kib(), time.process_time()
        try:
            parser.parse(given_bytes, folder)
        except parser.errors as error:
            assert str(error), "an error without a text"  # noqa: PT017
        assert time.process_time() - began < MAX_SECONDS
        growth += peak_kib() - before
    return growth


def inputs(name: str) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=300) | st.one_of(*map(mutated, PARSERS[name].samples))


def fuzz(name: str, folder: Path, profile: settings) -> None:
    growth = 0

    @profile
    @given(data=inputs(name))
    def run(data: bytes) -> None:
        nonlocal growth
        growth += check(name, folder, data)

    run()
    assert growth / 1024 < MAX_GROWTH_MIB


@pytest.mark.parametrize("name", PARSERS)
def test_good_bytes_are_read(name: str, tmp_path: Path) -> None:
    for sample in PARSERS[name].samples:
        try:
            PARSERS[name].parse(sample, tmp_path)
        except OffloadError as error:
            assert name in ("YAML configuration", "TOML configuration"), error  # noqa: PT017 - a key is for the syntax
        check(name, tmp_path, sample)


@pytest.mark.parametrize("name", PARSERS)
def test_bad_bytes_are_errors_with_a_name(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, examples(200, suppress_health_check=list(HealthCheck)))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PARSERS)
def test_many_bad_bytes_are_errors_with_a_name(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck)))


def test_every_module_that_decodes_bytes_is_listed() -> None:
    core = ROOT / "offload_core"
    decoding = {
        str(path.relative_to(core)) for path in core.rglob("*.py") if _DECODERS.search(path.read_text(encoding="utf-8"))
    }
    listed = {module for parser in PARSERS.values() for module in parser.modules}
    assert listed.isdisjoint(OWN_BYTES)
    assert decoding == listed | OWN_BYTES.keys()


def test_a_trace_without_the_end_of_a_line_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(4 << 20))
    before = peak_kib()
    with pytest.raises(ConfigError, match="line 1: longer than 16 MiB"):
        read_trace(path)
    assert (peak_kib() - before) / 1024 < MAX_GROWTH_MIB
