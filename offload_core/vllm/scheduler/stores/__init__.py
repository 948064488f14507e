"""The stores of each step: complete chunks, and those that wait for room."""
