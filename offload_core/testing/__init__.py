"""Tools for tests: tiny hybrid models, and runs of real engines in processes of their own."""
