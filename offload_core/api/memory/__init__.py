"""Host memory that processes share, and memory that is pinned for a GPU."""
