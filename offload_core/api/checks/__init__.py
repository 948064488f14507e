"""Checks of values that operators give, of folders that others control, and of the methods that a class overrides."""
