"""Times against measurements: the loads of benchmarks replayed, predictions, and numbers fitted to files."""
