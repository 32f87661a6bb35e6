"""The simulated engine on the wall clock: an OpenAI-compatible server that clients cannot tell from vLLM."""
