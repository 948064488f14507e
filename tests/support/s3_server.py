"""An S3-compatible server as a process of its own."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from tests.support.server_process import LOOPBACK, ServerProcess, accepts, free_port

S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""Variables that every client of the server needs."""


class S3Server(ServerProcess):
    """A moto server in its own process, started. It loses its objects when it is killed.

    Args:
        log: file that gets a line for each answered request.
        host: its address.
    """

    def __init__(self, log: Path | None = None, host: str = LOOPBACK) -> None:
        self.port = free_port(host)
        self.url = f"http://{host}:{self.port}"
        command = [sys.executable, "-m", "moto.server", "--host", host, "--port", str(self.port)]
        super().__init__(command, lambda: accepts(self.port, host), log)
        self.start()

    def client(self) -> Any:
        """Return a client of the server."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=S3_CREDENTIALS["AWS_DEFAULT_REGION"],
            config=Config(retries={"total_max_attempts": 3}),
        )

    def content(self, bucket: str) -> dict[str, bytes]:
        """Return the objects of a bucket, by key."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        keys = [found["Key"] for page in pages for found in page.get("Contents", ())]
        return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def fill(self, bucket: str, content: Mapping[str, bytes]) -> None:
        """Put objects into a bucket, by key."""
        client = self.client()
        for key, body in content.items():
            client.put_object(Bucket=bucket, Key=key, Body=body)

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket and return its name."""
        name = name or f"kv-{uuid.uuid4().hex[:12]}"
        try:
            self.client().create_bucket(Bucket=name)
        except botocore.exceptions.ClientError as error:
            raise AssertionError(f"no bucket: {error}") from error
        return name
