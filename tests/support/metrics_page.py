"""A ``/metrics`` page of an engine that is not there, over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer


class MetricsPage:
    """A page until it is closed; a test may change its text."""

    def __init__(self, text: str) -> None:
        self.text = text
        page = self

        class Engine(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/metrics"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                if found:
                    self.wfile.write(page.text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Engine)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. Harmless when repeated."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def served(text: str) -> Iterator[MetricsPage]:
    """Serve a text as ``/metrics`` until the block ends; every other path is not found."""

    page = MetricsPage(text)
    try:
        yield page
    finally:
        page.close()


def lines(values: Mapping[str, float], tier: str = "nvme", engine: str = "0") -> str:
    """Return our metrics of one tier, by their names without the common beginning, as vLLM shows them."""
    labels = f'engine="{engine}",model_name="m",tier="{tier}"'
    return "".join(f"vllm:hybrid_offload_{name}{{{labels}}} {value}\n" for name, value in values.items())
