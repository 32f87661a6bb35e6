"""Answers that users take away, recomputed from their definitions by small programs of their own."""
