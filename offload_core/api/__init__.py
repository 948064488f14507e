"""All names that a plugin may import. Their docstrings are the reference, and ``plugins.md`` is the guide."""

from offload_core.api.backend import (
    Backend,
    BackendContext,
    BackendType,
    LoadOutcome,
    LoadReservation,
    Requirement,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.cancellation import to_the_end
from offload_core.api.capabilities import Capabilities
from offload_core.api.checks.ownership import check_ownership
from offload_core.api.context import TierLogger
from offload_core.api.errors import (
    BackendError,
    ConfigError,
    ObjectFormatError,
    OffloadError,
    PlanError,
    PluginError,
    UnsupportedLayoutError,
)
from offload_core.api.events import (
    Event,
    LoadsEnded,
    ObjectsDamaged,
    ObjectsEvicted,
    Operation,
    StoresEnded,
    TierAvailable,
    TierClosed,
    TierFailing,
    TierOpened,
    TierRecovered,
    TierUnavailable,
)
from offload_core.api.eviction_order import EvictionOrder, EvictionPolicy
from offload_core.api.files.preallocation import preallocate
from offload_core.api.hooks import API_VERSION, OLDEST_API_VERSION, TierInfo, hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.addresses import address_of
from offload_core.api.memory.pinned_memory import CudaPinning, HostPinning, demand_pinning, pinning_in_use
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.api.one_pass import CHECK_BYTES, LoadCheck, StoreSeal
from offload_core.api.options import BackendOptions, Bytes, Folder, OptionsT, Seconds, check_folder
from offload_core.api.wrapper import BackendWrapper

__all__ = [
    "API_VERSION",
    "CHECK_BYTES",
    "OLDEST_API_VERSION",
    "Backend",
    "BackendContext",
    "BackendError",
    "BackendOptions",
    "BackendType",
    "BackendWrapper",
    "Bytes",
    "Capabilities",
    "ConfigError",
    "CudaPinning",
    "Event",
    "EvictionOrder",
    "EvictionPolicy",
    "Folder",
    "HostPinning",
    "LoadCheck",
    "LoadOutcome",
    "LoadReservation",
    "LoadsEnded",
    "ObjectFormatError",
    "ObjectKey",
    "ObjectsDamaged",
    "ObjectsEvicted",
    "OffloadError",
    "Operation",
    "OptionsT",
    "PlanError",
    "PluginError",
    "Requirement",
    "Seconds",
    "SharedMemory",
    "StoreOutcome",
    "StoreReservation",
    "StoreSeal",
    "StoredObject",
    "StoresEnded",
    "TierAvailable",
    "TierClosed",
    "TierFailing",
    "TierInfo",
    "TierLogger",
    "TierOpened",
    "TierRecovered",
    "TierUnavailable",
    "UnsupportedLayoutError",
    "address_of",
    "check_folder",
    "check_ownership",
    "demand_pinning",
    "hookimpl",
    "pinning_in_use",
    "preallocate",
    "to_the_end",
]
