"""The media that objects lie on: a mounted share, or an object store that fsspec speaks to."""
