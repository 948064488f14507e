"""Clients of a backend under test, and watches on their threads and calls."""
