"""KV cache pages, the layout of payloads, staging memory, and the copies between them."""
