"""An HTTP proxy that damages the answers to reads of objects on their way."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.damage import flipped

Damage = Callable[[bytes, int], tuple[bytes, int]]
"""Gets the body of an answer and the number of damaged answers before; returns the body to send and its length."""

DAMAGE: dict[str, Damage] = {
    "cut with its length": lambda body, count: (body[: len(body) // 2], len(body) // 2),
    "cut without its length": lambda body, count: (body[: len(body) // 2], len(body)),
    "longer": lambda body, count: (body + b"x" * 1000, len(body) + 1000),
    "a bit flipped": lambda body, count: (flipped(body, len(body) // 2 + count), len(body)),
    "a huge length": lambda body, count: (body, 1 << 40),
}


class MisbehavingProxy:
    """Forwards requests to a server of this machine, and damages answers to ``GET`` of objects while told to.

    Attributes:
        damage: the damage to do; ``None`` for none.
        answers_to_damage: the number of answers to damage; then all are sound.
    """

    def __init__(self, port: int) -> None:
        self.damage: Damage | None = None
        self.answers_to_damage = 1 << 30
        self.damaged = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server = http.client.HTTPConnection("127.0.0.1", port)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                content = answer.read()
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                is_object = self.command == "GET" and self.path.partition("?")[0].endswith(".kv")
                if proxy.damage and is_object and proxy.damaged < proxy.answers_to_damage:
                    content, nbytes = proxy.damage(content, proxy.damaged)
                    proxy.damaged += 1
                    length = str(nbytes)
                    self.close_connection = True
                self.send_response(answer.status)
                dropped = ("content-length", "connection", "transfer-encoding", "date", "server")
                for name, value in answer.getheaders():
                    if name.lower() not in dropped:
                        self.send_header(name, value)
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    if self.command != "HEAD":
                        self.wfile.write(content)
                server.close()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[MisbehavingProxy]:
        """Serve during the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="misbehaving-proxy")
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join(30)
            self._server.server_close()
