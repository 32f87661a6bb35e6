"""Kinds of engines: one file per kind says how it differs from others."""
