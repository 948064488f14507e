"""Random operations on a backend, checked against an oracle."""
