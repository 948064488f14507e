"""The vLLM connector. The only package of offload-core that imports vLLM.

Name it in ``--kv-transfer-config``::

    {"kv_connector": "HybridOffloadConnector", "kv_connector_module_path": "offload_core.vllm", "kv_role": "kv_both",
     "kv_connector_extra_config": {"config_file": "offload.yaml"}}
"""

from offload_core.vllm import compat  # noqa: F401  first: refuses a vLLM on which the next import would fail
from offload_core.vllm.connector import HybridOffloadConnector
from offload_core.vllm.multi.connector import WeightedMultiConnector

__all__ = ["HybridOffloadConnector", "WeightedMultiConnector"]
