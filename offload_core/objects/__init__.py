"""A stored object, byte by byte: format, codecs, compression and fingerprint."""
