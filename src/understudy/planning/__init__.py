"""Plans: the cheapest fleet for a log, found without a space given by hand, and what changes its bill."""
