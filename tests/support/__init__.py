"""The project's own labs: engine runs, a stand-in engine, tiny models and random workloads."""
