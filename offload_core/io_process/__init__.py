"""The I/O process: the tiers' storages in a process beside the engine's, and the engine's side of it."""
