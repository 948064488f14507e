"""The proof that text from a tier is the text that computing gives: its engine runs and their comparison."""
