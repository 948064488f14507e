"""The contract of a backend as a pytest class, with one module for each group of clauses."""
