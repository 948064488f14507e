"""A TCP proxy that makes a server of this machine a distant one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class FarProxy:
    """Forwards connections after a delay, and counts HTTP requests.

    Bytes arrive half a round trip later in each direction. The first bytes of a connection wait one round trip more, as
    for the handshake of TCP.

    Args:
        port: the server's port on the loopback address.
        round_trip_seconds: the added latency.
    """

    def __init__(self, port: int, round_trip_seconds: float) -> None:
        self.requests = 0
        self._server_port = port
        self._round_trip_seconds = round_trip_seconds
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="far-proxy")
        self.port = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[FarProxy]:
        """Serve on :attr:`port` during the block."""
        self._thread.start()
        try:
            assert self._listening.wait(30), "the proxy does not listen"
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        handshake = self._loop.time() + self._round_trip_seconds
        with contextlib.suppress(asyncio.CancelledError):  # the end of the proxy
            await asyncio.gather(
                self._forward(client_reader, server_writer, handshake, counts=True),
                self._forward(server_reader, client_writer, 0.0, counts=False),
            )
        client_writer.close()
        server_writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, not_before: float, *, counts: bool
    ) -> None:
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await delayed.get()
                await asyncio.sleep(max(due, not_before) - self._loop.time())
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        async def receive() -> None:
            data = b" "
            while data:
                data = await reader.read(1 << 16)
                if counts:
                    self.requests += data.count(b" HTTP/1.1\r\n")
                delayed.put_nowait((self._loop.time() + self._round_trip_seconds / 2, data))

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(send(), receive())
