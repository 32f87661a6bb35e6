"""Replay: drives simulated workers through a workload and fills the timeline that reports are made of."""
