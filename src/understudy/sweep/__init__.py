"""Sweeps: replay many settings of one workload, store the results, and find the cheapest fleet that meets a goal."""
