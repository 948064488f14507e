"""vLLM's configuration and KV cache groups, translated: geometry, identity, adapters, refusals and warnings."""
