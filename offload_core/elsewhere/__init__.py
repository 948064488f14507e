"""Serves the tiers to other systems than our connector: vLLM's own tiering, LMCache, and SGLang."""
