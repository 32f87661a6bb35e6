"""A fleet in one process: workers, one routed front end, a page that shows them."""
