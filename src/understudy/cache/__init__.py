"""Cache laboratory: hit ratios by cache size and policy, working sets, and their effect on latency."""
