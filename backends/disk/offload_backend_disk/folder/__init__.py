"""Objects as files in one folder: names, writes, direct I/O, and the mount below them."""
