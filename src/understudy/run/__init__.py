"""Runs: workloads through simulated workers on a virtual clock, and the record that they leave."""
