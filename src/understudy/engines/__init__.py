"""Simulated engines: configuration and version profiles."""
