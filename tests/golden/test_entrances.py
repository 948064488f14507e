"""The names by which vLLM, plugins and shells find offload-core."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from tests.golden import engine, subject


@pytest.mark.parametrize("module_path", ["offload_core.vllm", None], ids=["by its module", "by its name alone"])
def test_vllm_finds_the_connector(module_path: str | None) -> None:
    connector = engine.connector()  # which registers its name
    transfer = KVTransferConfig(
        kv_connector="HybridOffloadConnector",
        kv_connector_module_path=module_path,
        kv_role="kv_both",
        kv_connector_extra_config={"config_file": "offload.yaml"},
    )
    assert KVConnectorFactory.get_connector_class(transfer) is connector
    assert issubclass(connector, KVConnectorBase_V1)
    assert issubclass(connector, SupportsHMA)


def test_the_connectors_reports_add_up_in_the_servers_metrics() -> None:
    first = {"stores|nvme": 2, "stores|ram": 1, "breaker_open|nvme": 2}
    shown = engine.exposition([first, {"stores|nvme": 3, "breaker_open|nvme": -1}])
    assert [line for line in shown.splitlines() if not line.endswith(" 0.0")] == [
        'vllm:hybrid_offload_stores_total{engine="0",model_name="golden",tier="nvme"} 5.0',
        'vllm:hybrid_offload_stores_total{engine="0",model_name="golden",tier="ram"} 1.0',
        'vllm:hybrid_offload_breaker_open{engine="0",model_name="golden",tier="nvme"} 1.0',
    ]


def test_the_installed_entry_points_are_there_and_load() -> None:
    plugins = {point.name: point for point in entry_points(group="offload_core")}
    assert {"cpu", "disk", "nfs"} <= plugins.keys()
    for name in ("cpu", "disk", "nfs"):
        assert plugins[name].load().OFFLOAD_API_VERSION == 1
    (script,) = entry_points(group="console_scripts", name="offload-core")
    assert script.load() is subject.app
    (for_pytest,) = entry_points(group="pytest11", name="offload_core")
    assert for_pytest.load().pytest_addoption
