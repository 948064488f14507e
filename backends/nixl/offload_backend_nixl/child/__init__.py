"""The child process: it alone uses NIXL, and it can be killed at any time."""
