"""Simulated engines: configuration, version profiles, timing models, conformance with recorded schedules."""
