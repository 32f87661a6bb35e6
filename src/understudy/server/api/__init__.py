"""The HTTP API: what requests may say, how they are answered."""
