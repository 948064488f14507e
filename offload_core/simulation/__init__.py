"""The hits and bytes of a bounded tier on recorded prompts, by the planner, placement and eviction code that serves."""
