"""What the benchmarks share: timing, the pools that they compare, tables."""
