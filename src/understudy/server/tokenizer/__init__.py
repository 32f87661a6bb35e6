"""Tokenizers: a built-in one that needs no download, and those of local Hugging Face directories."""

from __future__ import annotations

from understudy.server.tokenizer.base import Tokenizer, open_tokenizer
from understudy.server.tokenizer.builtin import BuiltinTokenizer, builtin

__all__ = ["BuiltinTokenizer", "Tokenizer", "builtin", "open_tokenizer"]
