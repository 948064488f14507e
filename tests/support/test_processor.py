"""The line about the processor at the head of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processor import processor_line

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu fma avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
flags\t\t: avx512_fp16
"""
NEOVERSE = """processor\t: 0
Features\t: fp asimd sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("text", "machine", "line"),
    [
        (
            XEON,
            "x86_64",
            "processor: Intel(R) Xeon(R) Processor (x86_64); has avx2 fma avx512f avx512_bf16 amx_tile amx_bf16; "
            "lacks avx512_vnni avx512_fp16 amx_fp16",
        ),
        (
            NEOVERSE,
            "aarch64",
            "processor: CPU implementer 0x41 CPU part 0xd40 (aarch64); has asimd bf16 i8mm sve; "
            "lacks asimdhp sve2 svebf16 sme",
        ),
        ("processor\t: 0\nFeatures\t: edsp\n", "armv5", "processor: unknown (armv5); has none; lacks none"),
        ("processor\t: 0\nhart\t: 1\n", "riscv64", "processor: riscv64, features unknown"),
        ("", "arm64", "processor: arm64, features unknown"),
    ],
)
def test_names_the_features_of_the_first_processor(tmp_path: Path, text: str, machine: str, line: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_line(tmp_path / "cpuinfo", machine) == line


def test_says_unknown_where_there_is_no_such_file(tmp_path: Path) -> None:
    assert processor_line(tmp_path / "cpuinfo", "arm64") == "processor: arm64, features unknown"


def test_header_of_a_run_names_this_processor(pytestconfig: pytest.Config) -> None:
    header = pytestconfig.hook.pytest_report_header(config=pytestconfig, start_path=pytestconfig.rootpath)
    assert processor_line() in [line for part in header for line in ([part] if isinstance(part, str) else part)]
