"""New schedules of the real vLLM, recorded where it is installed: `make exact`."""
