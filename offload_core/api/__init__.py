"""Everything that a plugin may import."""
