"""Loads and stores of a worker, between the engine's blocks and the tiers."""
