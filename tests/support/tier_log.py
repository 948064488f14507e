"""A tier's logger for tests that construct parts of a backend."""

from offload_core.api import BackendContext
from offload_core.runtime.threads import DaemonExecutor

LOG = BackendContext("tests", DaemonExecutor(1, "tests")).logger(__name__)
