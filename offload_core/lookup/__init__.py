"""Depth of a request's prefix on the tiers."""
