"""How deep a prefix of a request the tiers hold."""
