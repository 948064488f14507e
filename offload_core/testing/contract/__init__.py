"""The contract of a backend as a pytest class, one module per group of clauses."""
