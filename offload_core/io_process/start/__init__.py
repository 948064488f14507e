"""The start of an I/O process, or the meeting with one that another process of the engine has started."""
