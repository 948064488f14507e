"""Hints of an orchestrator about prefixes: protection from eviction, prefetches, and answers."""
