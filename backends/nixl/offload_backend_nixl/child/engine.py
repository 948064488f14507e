"""The calls of NIXL, all of them: the only module that depends on its version (tried with 1.5.1).

NIXL has no deadlines, and a transfer in progress cannot be given up safely. Nothing here waits for a transfer: a mover
polls it, and the parent kills the process if it takes too long.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from offload_backend_nixl.protocol import RING

Direction = Literal["READ", "WRITE"]

_AGENT = "offload-core"


class EngineError(OSError):
    """NIXL cannot be used at all."""


class Piece(NamedTuple):
    """A part of an object, in memory that both processes share."""

    memory: int
    """The number of the memory."""
    offset: int
    nbytes: int


class Target(NamedTuple):
    """The other end of a transfer: an open file, or the name of an object."""

    descriptor: int | None = None
    object_name: str = ""


class Movement:
    """NIXL's part of a transfer in progress.

    Args:
        engine: its owner.
        handle: NIXL's handle.
        registration: NIXL's registration of the target.
        status: the status at the start.
    """

    def __init__(self, engine: NixlEngine, handle: Any, registration: Any, status: str) -> None:
        self._engine = engine
        self._handle = handle
        self._registration = registration
        self._status = status

    def poll(self) -> bool | None:
        """Return ``True`` after a success, ``False`` after a failure, ``None`` while it is in progress."""
        if self._status == "PROC":
            self._status = self._engine.status_of(self._handle)
        if self._status == "PROC":
            return None
        self._engine.release(self._handle, self._registration)
        return self._status == "DONE"


class NixlEngine:
    """One NIXL agent with one storage plugin. Each shared memory is registered once.

    One thread moves bytes; another may add memory meanwhile.

    Args:
        plugin: name of the plugin.
        params: its parameters.
        memory: the ring.

    Raises:
        EngineError: NIXL or the plugin does not load, or refuses its parameters.
    """

    def __init__(self, plugin: str, params: Mapping[str, str], memory: mmap.mmap) -> None:
        self._plugin = plugin
        self._segment = "OBJ" if plugin == "OBJ" else "FILE"
        self._object_numbers = itertools.count(1)
        self._memories: dict[int, tuple[ctypes.c_char, int]] = {}
        self._agent = _make_agent(plugin, params)
        self.add_memory(RING, memory)

    def add_memory(self, number: int, memory: mmap.mmap) -> None:
        """Register a shared memory, which stays mapped.

        Raises:
            EngineError: NIXL refuses it.
        """
        pinned = ctypes.c_char.from_buffer(memory)
        try:
            self._agent.register_memory(
                [(ctypes.addressof(pinned), len(memory), 0, "")], "DRAM", backends=[self._plugin]
            )
        except Exception as error:
            raise EngineError(f"NIXL's plugin {self._plugin} cannot register memory: {error}") from error
        self._memories[number] = (pinned, len(memory))

    def start(self, direction: Direction, pieces: Sequence[Piece], target: Target) -> Movement:
        """Begin a transfer between pieces of shared memory and the target, in which they follow each other.

        Raises:
            OSError: NIXL refused it, or a piece is outside of its memory. Then nothing touches the memory.
        """
        agent, plugin = self._agent, self._plugin
        addresses = list(map(self._address_of, pieces))
        offsets = list(accumulate((piece.nbytes for piece in pieces), initial=0))
        nbytes = offsets.pop()
        device = next(self._object_numbers) if target.descriptor is None else target.descriptor
        try:
            registration = agent.register_memory(
                [(0, nbytes, device, target.object_name)], self._segment, backends=[plugin]
            )
        except Exception as error:
            raise OSError(f"NIXL's plugin {plugin} refused an object: {error}") from error
        try:
            handle = agent.initialize_xfer(
                direction,
                agent.get_xfer_descs([(at, one.nbytes, 0) for at, one in zip(addresses, pieces, strict=True)], "DRAM"),
                agent.get_xfer_descs(
                    [(at, one.nbytes, device) for at, one in zip(offsets, pieces, strict=True)], self._segment
                ),
                _AGENT,
                b"",
                [plugin],
            )
        except Exception as error:
            agent.deregister_memory(registration, backends=[plugin])
            raise OSError(f"NIXL's plugin {plugin} refused a transfer: {error}") from error
        return Movement(self, handle, registration, self._post(handle))

    def _address_of(self, piece: Piece) -> int:
        pinned, nbytes = self._memories.get(piece.memory, (None, 0))
        if pinned is None or piece.offset + piece.nbytes > nbytes:
            raise OSError(errno.EFAULT, f"{piece} is outside of the shared memory")
        return ctypes.addressof(pinned) + piece.offset

    def status_of(self, handle: Any) -> str:
        """Return ``DONE``, ``PROC`` or ``ERR``."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception:  # NIXL's own errors, which have no common base
            return "ERR"

    def release(self, handle: Any, registration: Any) -> None:
        """Free the handle and the registration of a transfer that has ended."""
        self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(registration, backends=[self._plugin])

    def _post(self, handle: Any) -> str:
        try:
            return str(self._agent.transfer(handle))
        except Exception:
            return "ERR"


def _make_agent(plugin: str, params: Mapping[str, str]) -> Any:
    api = _import_api()
    try:
        locked = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        agent = api.nixl_agent(_AGENT, api.nixl_agent_config(backends=[], sync_mode=locked))
    except Exception as error:
        raise EngineError(f"NIXL does not start: {error}") from error
    try:
        agent.create_backend(plugin, dict(params))
    except Exception as error:
        raise EngineError(
            f"NIXL's plugin {plugin} does not start ({error}); check params ({', '.join(sorted(params)) or 'none'}). "
            f"NIXL has the plugins {', '.join(sorted(agent.get_plugin_list()))} here, and each needs its libraries"
        ) from error
    return agent


def _import_api() -> Any:
    """Import NIXL's build for CUDA 12, the one whose plugin for S3 loads without CUDA. ``nixl`` would import torch."""
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise EngineError(f"nixl_cu12 does not load ({error}); pip install 'offload-core[nixl]'") from error
    return _api
