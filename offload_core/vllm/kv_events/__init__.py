"""The tiers' content as vLLM's KV cache events, for routers and other subscribers."""
