"""Tools for tests: tiny hybrid models, and (to come) the contract tests for backends."""
