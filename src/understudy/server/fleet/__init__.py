"""A fleet in one process: many workers, one front door, a page that shows them."""
