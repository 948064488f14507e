"""Random operations on a backend, with every answer checked against an oracle."""
