"""Announcements of the tiers' content to readers outside the engine, as differences and as repetitions."""
