"""Real engines for tests, the demo and benchmarks: a runner, and the stock connector's peer."""
