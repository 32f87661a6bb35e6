"""Runs of simulated engines that are compared with recordings of real ones, step by step."""
