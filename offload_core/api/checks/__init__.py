"""Checks of values that operators give: credentials in a configuration, and folders that others control."""
