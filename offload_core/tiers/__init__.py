"""One backend in service: its calls, accounting, health, circuit breaker and compression."""
