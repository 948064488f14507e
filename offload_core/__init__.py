"""offload-core keeps the KV cache of hybrid language models on storage tiers.

The folders are the rooms of the package. Each one imports only from rooms before it in this list:

* :mod:`offload_core.api` has all names that a plugin may import; ``runtime`` has threads, counters and gauges.
* ``planning`` decides which tokens make an object; ``objects`` defines its bytes; ``plugins`` loads plugins;
  :mod:`offload_core.testing` is the public test harness for backends.
* ``memory`` copies between KV pages and payloads.
* ``config`` reads and checks the configuration.
* ``tiers`` puts a backend into service.
* ``lookup`` finds the depth of a stored prefix; ``transfer`` loads and stores; ``cli`` has the commands.
* :mod:`offload_core.vllm` connects all of it to vLLM.
* :mod:`offload_core.elsewhere` serves the tiers to other systems. Only its modules for a system import that system.

Only ``api`` and ``testing`` are public. Authors of plugins start with ``plugins.md``.
"""

from importlib.metadata import version

__version__ = version("offload-core")
