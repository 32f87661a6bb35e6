"""Answers of a required form, from the library that vLLM uses, `llguidance`: it says which bytes may come next."""
