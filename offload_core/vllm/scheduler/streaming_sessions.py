"""Requests whose input comes in turns, beside loads: vLLM keeps the blocks of such a session between its turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_core.vllm.scheduler.block_holders import BlockHolders

if TYPE_CHECKING:
    from vllm.v1.request import Request


class StreamingSessions:
    """The open sessions with streaming input. All methods run on the engine thread.

    A request that has loaded holds blocks until it runs, and so does a session between its turns. Both wait in one
    queue of vLLM. If the request lacks blocks that the session holds, it stops the queue. Then the next turn, which
    waits behind it, never runs (seen with 0.32). So sessions and loads of other requests are kept apart in time. Loads
    within the step do no harm, since their requests run at once.
    """

    def __init__(self, block_holders: BlockHolders) -> None:
        self._block_holders = block_holders
        self._open: set[str] = set()

    def begin(self, request: Request) -> None:
        """Note a new request, if it is a session."""
        if getattr(request, "resumable", False):
            self._open.add(request.request_id)

    def end(self, request_id: str) -> None:
        """Note the end of a request."""
        self._open.discard(request_id)

    def must_wait(self, request_id: str) -> bool:
        """Return whether a request is a session that must not begin yet, since another request holds blocks to load.

        This wait ends with the loads that have begun: no other load begins while the session is open.
        """
        return request_id in self._open and self._block_holders.loads_beside(request_id)

    def may_load(self, request_id: str) -> bool:
        """Return whether a request may hold blocks while it loads: no other session is open."""
        return self._open <= {request_id}
