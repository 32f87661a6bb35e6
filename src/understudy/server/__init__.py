"""Live server: simulated engines on the wall clock behind vLLM's HTTP API."""
