"""The media for objects: a mounted share, or an object store behind fsspec."""
