"""Operators' files and keys, checked and converted to values."""
