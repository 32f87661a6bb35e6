"""A standalone router: an HTTP proxy in front of real engines that routes by what they say of their caches."""
