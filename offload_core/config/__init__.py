"""Operators' files and keys, checked and turned into values."""
