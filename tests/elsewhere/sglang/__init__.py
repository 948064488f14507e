"""Checks of our backend on SGLang's own machinery. They run in processes of their own; see test_sglang_hicache.py."""
