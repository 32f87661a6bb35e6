"""vLLM's command line: its grammar, and what its flags mean here."""

from __future__ import annotations

from understudy.server.flags.grammar import CommandLine, Flag, read_command_line, vllm_flags

__all__ = ["CommandLine", "Flag", "read_command_line", "vllm_flags"]
