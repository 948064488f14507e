"""Tests on the simulated accelerator. ``tests/core/memory/test_simulated_accelerator.py`` runs them in a process."""
