"""One backend in service: its calls, accounting, health, circuit breaker, compression and encryption."""
