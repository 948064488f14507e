"""The message of the workers to the scheduler at start, with a part for each connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

Rank = TypeVar("Rank")


@dataclass
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """The handshake metadata of all connectors of one worker, in their order."""

    metadata: tuple[KVConnectorHandshakeMetadata | None, ...]


def parts_of(
    metadata: Mapping[Rank, KVConnectorHandshakeMetadata], connector: int
) -> dict[Rank, KVConnectorHandshakeMetadata]:
    """Return one connector's part of the metadata of all ranks, without the ranks that have none."""
    parts: dict[Rank, KVConnectorHandshakeMetadata] = {}
    for rank, item in metadata.items():
        assert isinstance(item, MultiHandshakeMetadata)
        if (part := item.metadata[connector]) is not None:
            parts[rank] = part
    return parts
