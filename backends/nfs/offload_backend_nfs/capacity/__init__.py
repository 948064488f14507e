"""The limit that all processes on all hosts keep together: leases, the shared account and eviction."""
