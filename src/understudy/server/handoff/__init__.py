"""Hand-offs of KV blocks between live servers, by the rules of vLLM's NixlConnector."""
