"""Replays of workloads on simulated workers with a virtual clock, and the records of such runs."""
