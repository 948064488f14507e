"""The client of the LMCache server's module: sockets only, without LMCache and torch."""
