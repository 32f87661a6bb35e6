"""Simulated times beside measured ones: the parts of benchmarks/accuracy.py."""
