"""Connectors with a fault: one chunk of every load is left out, and the load is reported as whole all the same."""

from __future__ import annotations

import dataclasses
from typing import Any

from offload_core.vllm.metadata import ChunkTransfer
from tests.support.engine.poisoning import PoisoningConnector


class _Forgetful(PoisoningConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        step.loads = [dataclasses.replace(load, chunks=self.kept(load.chunks)) for load in step.loads]
        super().start_load_kv(forward_context, **kwargs)

    @staticmethod
    def kept(chunks: tuple[ChunkTransfer, ...]) -> tuple[ChunkTransfer, ...]:
        raise NotImplementedError


class ForgetsFirstChunk(_Forgetful):
    @staticmethod
    def kept(chunks: tuple[ChunkTransfer, ...]) -> tuple[ChunkTransfer, ...]:
        return chunks[1:]


class ForgetsLastChunk(_Forgetful):
    @staticmethod
    def kept(chunks: tuple[ChunkTransfer, ...]) -> tuple[ChunkTransfer, ...]:
        return chunks[:-1]
