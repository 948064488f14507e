"""Estimates of the seconds that loads and prefills take, from those before."""
