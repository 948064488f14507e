"""The protocol between the backend and its module in the LMCache server. Both sides share it."""
