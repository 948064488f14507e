"""vLLM's scheduler and KV cache managers with real tensors and without a forward pass."""
