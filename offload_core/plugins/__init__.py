"""Finds plugins, loads them and tells them of events."""
