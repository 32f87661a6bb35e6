"""Live fleets: workers in one process or several, one routed front end, and a page that shows them."""
