"""The engine's side: the child process, the memory that both share, and the copies into and out of it."""
