"""Clusters of the distributed engines on this machine, one module for each engine."""
