"""Description of the processor that tests run on, since a model's numbers depend on it."""

from __future__ import annotations

import platform
from pathlib import Path

FEATURES = (
    ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16"),
    ("asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme"),
)
"""Features that decide the choice of kernels, for x86 and for Arm, by Linux's names."""

CPUINFO = Path("/proc/cpuinfo")


def processor_line(cpuinfo: Path = CPUINFO, machine: str = platform.machine()) -> str:
    """Name the processor, its features that decide the choice of kernels, and the features that it lacks.

    Args:
        cpuinfo: Linux's description of the processors; only the first processor counts.
        machine: the architecture's name.
    """
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    present = set(fields.get("flags", fields.get("Features", "")).split())
    if not present:
        return f"processor: {machine}, features unknown"
    family = next((known for known in FEATURES if not present.isdisjoint(known)), ())
    has = [name for name in family if name in present]
    lacks = [name for name in family if name not in present]
    model = fields.get("model name") or " ".join(
        f"{name} {fields[name]}" for name in ("CPU implementer", "CPU part") if name in fields
    )
    return (
        f"processor: {model or 'unknown'} ({machine}); has {' '.join(has) or 'none'}; lacks {' '.join(lacks) or 'none'}"
    )
