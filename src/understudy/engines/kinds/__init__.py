"""What differs between kinds of engines, in one file per kind."""
