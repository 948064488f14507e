"""offload-core keeps the KV cache of hybrid language models on storage tiers.

This package is engine-agnostic; :mod:`offload_core.vllm` connects it to vLLM. Backend authors need
:mod:`offload_core.api.backend`, :mod:`offload_core.api.hooks` and :mod:`offload_core.testing`; see plugins.md.
"""

from importlib.metadata import version

__version__ = version("offload-core")
