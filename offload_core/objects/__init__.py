"""A stored object, byte by byte: format, codecs, compression, encryption and fingerprint."""
