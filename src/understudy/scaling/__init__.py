"""Scalers: rules that decide how many workers a fleet has."""
