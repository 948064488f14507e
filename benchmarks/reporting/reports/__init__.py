"""The reports of single benchmarks: tables, a finding and a plot."""
