"""Results of the benchmarks: written as JSON, shown as tables, drawn as plots."""
