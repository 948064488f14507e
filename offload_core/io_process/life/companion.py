"""The start of an I/O process: its program, its first message, and its environment."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Final

from offload_core.api.errors import ConfigError
from offload_core.config.model import OffloadConfig
from offload_core.io_process import protocol
from offload_core.runtime.companion_process import CompanionProcess, WorkingFolder

MODULE: Final = "offload_core.io_process"
WITHHELD: Final = frozenset(
    {
        "HF_OIDC_ID_TOKEN",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "S3_ACCESS_KEY_ID",
        "S3_SECRET_ACCESS_KEY",
        "VLLM_API_KEY",
    }
)
"""Credentials of vLLM and of the model hub (``vllm/envs.py``, ``huggingface_hub``). No tier needs them."""


def make_companion(
    config: OffloadConfig, folder: WorkingFolder | None, descriptors: Mapping[str, int], on_end: Callable[[str], None]
) -> CompanionProcess:
    """Make an I/O process, which is not started yet.

    Args:
        config: the process reads this configuration again, without its files.
        folder: relative paths of the configuration start there; see :class:`CompanionProcess`.
        descriptors: see :class:`CompanionProcess`.
        on_end: see :class:`CompanionProcess`.

    Raises:
        ConfigError: this process may use none of the processors for the I/O process.
    """
    _check_cpus(config.settings.io_process_cpus)
    payload = {
        "protocol": protocol.VERSION,
        "config": dict(config.keys),
        "log_level": logging.getLogger("offload_core").getEffectiveLevel(),
    }
    return CompanionProcess(
        MODULE,
        descriptors=descriptors,
        payload=json.dumps(payload, default=str).encode(),  # a script may pass paths
        limits=config.settings.io_process_limits,
        withheld=WITHHELD,
        folder=folder,
        on_end=on_end,
    )


def _check_cpus(cpus: Collection[int]) -> None:
    own = os.sched_getaffinity(0)
    if not cpus or own & set(cpus):
        return
    try:
        os.sched_setaffinity(0, cpus)  # of this thread alone: only the kernel knows which ones are allowed
    except OSError as error:
        raise ConfigError(
            [
                f"io_process_cpus: the I/O process may use none of the processors {sorted(cpus)} ({error.strerror}); "
                f"the engine uses {sorted(own)}"
            ]
        ) from None
    os.sched_setaffinity(0, own)
