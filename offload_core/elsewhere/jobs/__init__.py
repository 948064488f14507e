"""The jobs of a store behind another system: their objects, their ends, and the prompts that they serve."""
