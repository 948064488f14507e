"""Threads, the I/O loop, counters and gauges."""
