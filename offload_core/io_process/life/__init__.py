"""The life of an I/O process: its start, or the meeting with one that another process has started, and its end."""
