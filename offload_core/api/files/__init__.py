"""Help for backends that write files."""
