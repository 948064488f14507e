"""Opens the tiers of an I/O process that has ended in the next one."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from offload_core.io_process.protocol import Kind
from offload_core.io_process.remote_storage import RemoteStorage
from offload_core.io_process.session import Session

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 5.0


async def reopen(storage: RemoteStorage, session: Session) -> bool:
    """Open a tier in a new process, again and again until it works.

    Returns:
        ``False`` if the tier was closed meanwhile, or the process has ended.
    """
    while storage.wants_open and not session.is_killed:
        try:
            await session.call(Kind.OPEN, storage.number)
            await storage.map_lent_memory()
        except Exception as error:
            logger.warning(
                "%s cannot be opened in the new I/O process: %s; it is tried again every %g s",
                storage.label, error, _PAUSE_SECONDS,
            )  # fmt: skip
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return True
    return False
