"""Prefill and decode servers of SGLang: prompts computed on one, whose KV is pushed to the other."""
