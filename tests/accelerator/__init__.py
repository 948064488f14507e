"""Tests on an accelerator. ``tests/core/memory/test_on_an_accelerator.py`` runs them in a process for each device."""
