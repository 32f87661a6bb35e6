"""The version of Understudy."""

__version__ = "0.1.0"
