"""All that the golden tests use of offload-core: the one place to change when a module moves."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from offload_core.api import errors, events
from offload_core.api.backend import (
    Backend,
    BackendContext,
    BackendType,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.checks.ownership import check_ownership
from offload_core.api.errors import ConfigError, ObjectFormatError
from offload_core.api.files.preallocation import preallocate
from offload_core.api.hooks import API_VERSION, OLDEST_API_VERSION, HookSpecs, TierInfo
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck
from offload_core.api.options import BackendOptions, check_folder
from offload_core.api.wrapper import BackendWrapper
from offload_core.cli import app
from offload_core.config.geometry_file import load_geometry
from offload_core.config.loading import load_config
from offload_core.memory.block_copier import BlockSlice, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import StagingPool
from offload_core.memory.staging_shares import share_out
from offload_core.memory.staging_size import StagingUse
from offload_core.objects.compression import compress, largest_compressed_bytes, verify_any
from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import Json, files_identity, fingerprint
from offload_core.objects.format import FORMAT_VERSION, HEADER_BYTES, Codec, read_header, seal
from offload_core.planning.chunk_keys import ChunkHashes, object_keys
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, Pack
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.testing.contract.suite import BackendContract, contract_tests
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.tiers.staged_object import StagedObject
from tests.support.tiny_models import write_gemma3

__all__ = [
    "API_VERSION",
    "FORMAT_VERSION",
    "OLDEST_API_VERSION",
    "Backend",
    "BackendContract",
    "BackendOptions",
    "BackendType",
    "HookSpecs",
    "Json",
    "LayerPages",
    "ObjectFormatError",
    "ObjectKey",
    "PluginRegistry",
    "app",
    "check_folder",
    "check_ownership",
    "contract_tests",
    "fingerprint",
    "load_plugins",
    "preallocate",
    "verify_any",
]

PUBLIC_CLASSES: tuple[type, ...] = (
    *(Backend, BackendContext, BackendOptions, BackendType, BackendWrapper, Capabilities, TierInfo, ObjectKey),
    *(LoadCheck, LoadOutcome, LoadReservation, StoreOutcome, StoreReservation, StoredObject),
    *(value for module in (errors, events) for value in vars(module).values() if isinstance(value, type)),
)
"""What plugin authors write and get."""

ENGINE_MODULE = "offload_core.vllm"
"""Operators write it in ``kv_connector_module_path``: it stays."""

CODECS = {"none": Codec.NONE, "zstd": Codec.ZSTD, "zstd-planes": Codec.ZSTD_PLANES}
SECONDS = 60


def request_options() -> Any:
    """Return the model of a request's own wishes, and the key that holds them; this imports vLLM."""
    module = importlib.import_module("offload_core.vllm.scheduler.request_options")
    return module.REQUEST_KEY, module.RequestOptions


def run_engine(folder: Path, kv: Path, prompt_tokens: int, ranks: int) -> tuple[dict[str, Json], list[Json]]:
    """Run a stand-in engine of ``ranks`` workers until it has stored a prompt on a disk tier; this imports vLLM.

    Returns:
        The engine's part of the identity, and each worker's.
    """
    models = importlib.import_module("tests.support.standin.geometries").MODELS
    engines = importlib.import_module("tests.support.standin.engine")
    identity = importlib.import_module("offload_core.vllm.model.identity")
    write_gemma3(folder, max_position_embeddings=16384)
    tier = {"name": "golden", "type": "disk", "path": str(kv)}
    settings = {"backends": [tier], "staging_bytes": "32MiB", "shutdown_timeout_seconds": SECONDS}
    engine = engines.StandInEngine(models["gpt_oss"](), folder, settings, ranks=ranks)
    workers = [worker.connector.get_handshake_metadata().layout for worker in engine.workers]
    engine.add([3 + number % 997 for number in range(prompt_tokens)], 1)
    while engine.busy:
        engine.step()
    engine.shutdown()
    return identity.engine_identity(engine.vllm_config, engine.kv_cache_config), workers


def run_command(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run the command line in this process; returns exit code, stdout and stderr."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "NO_COLOR": "1"}, catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


# Objects


def model_identity(folder: Path) -> dict[str, Json]:
    """Return the identity of a model's folder, without digests from earlier runs."""
    return files_identity(folder, FileDigests(None))


def sealed(key: ObjectKey, payload: bytes) -> bytes:
    """Return the object as it is stored without compression."""
    whole = bytearray(HEADER_BYTES + len(payload))
    whole[HEADER_BYTES:] = payload
    seal(memoryview(whole), key)
    return bytes(whole)


def written(codec: str, key: ObjectKey, payload: bytes) -> bytes:
    """Return the object as it is stored with a codec."""
    whole = sealed(key, payload)
    if codec == "none":
        return whole
    target = memoryview(bytearray(largest_compressed_bytes(len(whole))))
    source = memoryview(whole)
    used = compress(read_header(source, key), source, target, CODECS[codec], 1)
    assert used is not None, "the payload does not get smaller"
    return bytes(target[:used])


def payload(groups: Sequence[Sequence[LayerPages]], blocks: Sequence[Sequence[int]]) -> tuple[Json, bytes]:
    """Gather one object's payload from the caches of groups, of which it has so many blocks of each.

    Returns:
        The description of the caches that is part of an engine's identity, and the payload.
    """
    caches = CanonicalKVCaches.build(groups)
    unit = math.lcm(*map(len, blocks))
    members = tuple(GroupGeometry(index, unit // len(ids), HitPolicy("full")) for index, ids in enumerate(blocks))
    pack = Pack(f"full-u{unit}", unit, HitPolicy("full"), unit, members)
    layout = PackLayout.build(pack, caches, range(len(groups)))
    gathered = torch.empty(layout.payload_bytes, dtype=torch.int8)
    CpuBlockCopier(caches).gather(layout, [BlockSlice(0, tuple(ids)) for ids in blocks], gathered)
    return caches.describe(), gathered.numpy().tobytes()


class OpenTier:
    """A tier as a worker has it, over a folder."""

    def __init__(self, io: IoLoop, tier: Any, pool: StagingPool) -> None:
        self._io, self._tier, self._pool = io, tier, pool

    def store(self, key: ObjectKey, payload: bytes) -> bool:
        """Store a payload; returns whether the tier has it now."""
        staged = self._staged(key, len(payload))
        staged.lease.view[:] = sealed(key, payload)
        (there,) = self._io.submit(self._tier.store([staged])).result(SECONDS)
        staged.lease.release()
        return bool(there)

    def load(self, key: ObjectKey, payload_bytes: int) -> tuple[str, bytes]:
        """Load an object; returns ``hit``, ``miss``, ``corrupt`` or ``failed``, and the bytes of a hit."""
        staged = self._staged(key, payload_bytes)
        (outcome,) = self._io.submit(self._tier.load([staged])).result(SECONDS)
        found = bytes(staged.lease.view) if outcome is LoadOutcome.HIT else b""
        staged.lease.release()
        return ("failed" if outcome is None else outcome.value), found

    def _staged(self, key: ObjectKey, payload_bytes: int) -> StagedObject:
        lease = self._pool.try_acquire(HEADER_BYTES + payload_bytes, for_store=False)
        assert lease is not None
        lease.tensor.fill_(0x5A)
        return StagedObject(key, lease)


@contextmanager
def open_tier(configuration: Mapping[str, Any], payload_bytes: int) -> Iterator[OpenTier]:
    """Open the one tier of a configuration, with staging memory."""
    io = IoLoop.acquire()
    tiers = open_tiers(load_config(configuration), io, Counters())
    try:
        (tier,) = tiers
        pool = StagingPool(4 << 20, 0.5)
        tier.staging = share_out(pool, {tier.name: StagingUse(encodes=tier.encodes)}, payload_bytes)[tier.name]
        yield OpenTier(io, tier, pool)
    finally:
        close_tiers(tiers, io, SECONDS)
        io.release()


def store_on_backend(configuration: Mapping[str, Any], objects: Mapping[ObjectKey, bytes]) -> None:
    """Store whole objects on the one backend of a configuration, without a tier around it."""
    (tier,) = load_config(configuration).tiers

    async def store() -> None:
        medium = tier.backend_type.backend(tier.options, BackendContext("golden", executor))
        await medium.open()
        reservation = await medium.prepare_store(list(objects), list(map(len, objects.values())))
        await medium.store(list(objects), [memoryview(whole) for whole in objects.values()])
        await reservation.release()
        await medium.close()

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(store())


def capabilities(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the one backend of a configuration declares."""
    (tier,) = load_config(configuration).tiers
    with ThreadPoolExecutor(1) as executor:
        medium = tier.backend_type.backend(tier.options, BackendContext("golden", executor))
    return dataclasses.asdict(medium.capabilities)


# Plans


def planned(geometry: Path) -> HybridOffloadPlanner:
    """Return the plan of a geometry file."""
    model = load_geometry(geometry)
    return model.planner(model.hybrid_chunk_size)


def object_names(pack: Pack, units: Sequence[int], block_hashes: Sequence[bytes], namespace: str) -> list[str]:
    """Return the names of a pack's objects, as a worker writes them."""
    hashes = ChunkHashes(block_hashes, pack.hash_factor)
    named = [key.path for key in object_keys(namespace, pack.name, (hashes[unit] for unit in units))]
    assert named == [ObjectKey(namespace, pack.name, block_hashes[pack.hash_index(unit)]).path for unit in units]
    return named


# Configuration


def configured(
    configuration: Mapping[str, Any], environ: Mapping[str, str], registry: PluginRegistry | None = None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return all values that a configuration comes to, or ``None``, and its problems."""
    try:
        config = load_config(configuration, registry, environ)
    except ConfigError as error:
        return None, list(error.problems)
    settings = config.settings.model_dump(mode="json")
    settings["backends"] = [
        {**tier.common.model_dump(mode="json", exclude=set(tier.common.model_extra or ())), "options": dumped}
        for tier in config.tiers
        for dumped in [tier.options.model_dump(mode="json")]
    ]
    return settings, []
