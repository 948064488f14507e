"""Seeded faults of storage media, for backends that must survive them."""
