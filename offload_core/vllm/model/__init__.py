"""Reads vLLM's configuration and KV cache groups: geometry, identity, adapters and refusals."""
