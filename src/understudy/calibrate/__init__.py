"""Calibrate timing models: replay the loads of benchmarks, predict their times, and fit parameters to them."""
