"""Seeded faults of storage media."""
