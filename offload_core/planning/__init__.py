"""The tokens that make an object and the objects that make a hit: pure arithmetic."""
