"""Fixtures for the fault file system's own tests."""

from tests.faultfs.fixtures import fault_fs as fault_fs
