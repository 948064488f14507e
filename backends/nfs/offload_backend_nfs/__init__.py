"""The ``nfs`` backend: storage that many engines on many hosts share, by an fsspec URL."""
