"""Routing: what a router knows of caches, and how it chooses a worker."""

from understudy.router.prefix_index import Applied, IndexDump, Matches, PrefixIndex

__all__ = ["Applied", "IndexDump", "Matches", "PrefixIndex"]
