"""A real S3-compatible server in a process of its own, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator

import boto3

_START_SECONDS = 30.0


def variables() -> dict[str, str]:
    """Return the environment of the server's clients: any credentials, and a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "AWS_ACCESS_KEY_ID": "engine-tests",
        "AWS_SECRET_ACCESS_KEY": "engine-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


@contextlib.contextmanager
def s3_server() -> Iterator[None]:
    """Run the server that :func:`variables`, in this process's environment, have named."""
    port = os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", port]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pause = threading.Event()
        for _ in range(int(_START_SECONDS * 10)):
            assert process.poll() is None, f"the S3 server ended with {process.returncode}"
            with contextlib.suppress(OSError), urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"], timeout=5):
                break
            pause.wait(0.1)
        yield
    finally:
        process.kill()
        process.wait(10)


def new_bucket() -> str:
    """Make a bucket and return its URL."""
    name = f"kv-{uuid.uuid4()}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"
