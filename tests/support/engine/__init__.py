"""Runs of the real engine in processes of their own."""
