"""Threads, the I/O loop, child processes, shared memory, counters and gauges."""
