"""Labs of distributed engines: each starts the real servers of one engine and can hurt them."""
