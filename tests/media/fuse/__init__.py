"""A real file system whose operations hang, fail and lie when a test says so: a pass-through on FUSE.

``rules`` says what may go wrong, ``filesystem`` does it, ``daemon`` is the process that serves one mount and cleans up
after it, ``mount`` is what a test holds, ``fixtures`` mounts one for a test.
"""
