"""The inside of the I/O process: the processes of the engine that it serves, and the tiers that they share."""
