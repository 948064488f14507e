"""The limit that all processes on a host keep together on one folder: account, pins and eviction."""
