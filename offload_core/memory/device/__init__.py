"""Copies between the KV cache on an accelerator and host memory, which nobody waits for."""
