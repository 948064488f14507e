"""The commands of ``offload-core``, one module each."""
