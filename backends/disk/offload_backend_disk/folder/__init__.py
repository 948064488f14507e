"""Objects as files in one folder: names, writes, direct I/O, its processes, and the mount below it."""
