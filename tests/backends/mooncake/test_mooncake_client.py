"""A client whose call may have left transfers behind is replaced before the call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from offload_backend_mooncake import client as client_module
from offload_backend_mooncake.client import Client, Cluster
from offload_backend_mooncake.library import Deadlines


class FakeStore:
    closed = False

    def close(self) -> None:
        self.closed = True


def raises(store: FakeStore) -> Sequence[int]:
    raise RuntimeError("the call ended in an exception of C++")


@pytest.mark.parametrize(
    ("call", "late", "is_replaced"),
    [
        (lambda store: [100, 100], True, False),
        (lambda store: [100, -800], True, True),
        (lambda store: [100, -800], False, False),
        (raises, True, True),
        (raises, False, False),
    ],
    ids=["late, whole", "late, failed", "failed in time", "late, raised", "raised in time"],
)
def test_a_client_is_replaced_after_a_late_failure_only(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[FakeStore], Sequence[int]], late: bool, is_replaced: bool
) -> None:
    monkeypatch.setattr(client_module, "_SUSPICIOUS_SECONDS", 0.0 if late else 1000.0)
    client = Client(Cluster("127.0.0.1:1", "P2PHANDSHAKE", None, "tcp", "", Deadlines(1, 1, 1), insecure=False))
    client._store = store = FakeStore()
    if call is raises:
        with pytest.raises(OSError, match="Mooncake raised RuntimeError"):
            client.transfer(call)
    else:
        assert client.transfer(call) == call(store)
    assert (store.closed, client._store is None) == (is_replaced, is_replaced)
