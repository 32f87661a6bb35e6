"""A standalone router: an HTTP proxy in front of engines, which routes by the KV events that they publish."""
