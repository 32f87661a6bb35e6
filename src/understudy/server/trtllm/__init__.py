"""The HTTP API of trtllm-serve 1.3.0rc25: routes, errors, answers, iteration statistics and KV events."""
