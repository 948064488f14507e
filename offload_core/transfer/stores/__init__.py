"""Objects on their way from the KV cache to tiers: their memory, their batches and the tiers that take them."""
