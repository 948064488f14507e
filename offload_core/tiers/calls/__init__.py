"""Kinds of calls of one tier: their health, deadlines and slots."""
