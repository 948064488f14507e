"""One capacity for all processes on all hosts: leases, the shared account, quotas and eviction."""
