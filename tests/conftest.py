"""Hypothesis profiles: no test measures time, and the sanitized core gets by with fewer examples."""

from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sanitize", settings.get_profile("default"), max_examples=25)
settings.load_profile("default")
