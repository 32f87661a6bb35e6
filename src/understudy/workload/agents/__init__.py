"""Traces of agents: readers whose requests wait for one another, and a writer."""
