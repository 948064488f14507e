"""The worker half: the engine's tensors, and the loads and stores of each step."""
