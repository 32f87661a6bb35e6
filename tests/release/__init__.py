"""The drill for a new vLLM release: record, compare with a profile, shrink, report (`make release`)."""
