"""Writes the built-in tokenizer in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from understudy.server.tokenizer.builtin import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    MODEL_VOCABULARY,
    PIECES,
    SPECIAL,
    TURN_END,
    BuiltinTokenizer,
    builtin,
)

if TYPE_CHECKING:
    from pathlib import Path


def export_tokenizer(folder: Path, *, hub: bool = False) -> Path:
    """Write the tokenizer's files into `folder`, or with `hub` as a hub cache (an `HF_HOME`) under it.

    Returns where `tokenizer.json` lies. The cache's name for it is `understudy/tok`.
    """
    contents = {name: _text(value) for name, value in _files(builtin()).items()}
    target = folder
    if hub:
        revision = hashlib.sha1("".join(contents.values()).encode()).hexdigest()
        root = folder / "hub" / f"models--{BuiltinTokenizer.name.replace('/', '--')}"
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(revision)
        target = root / "snapshots" / revision
    target.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (target / name).write_text(text, encoding="utf-8")
    return target


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def _files(tokenizer: BuiltinTokenizer) -> dict[str, Any]:
    return {
        "tokenizer.json": _tokenizer_json(tokenizer),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [text for text in SPECIAL if text != END_OF_TEXT],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131072,
            "chat_template": CHAT_TEMPLATE,
        },
        "special_tokens_map.json": {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT},
        "chat_template.jinja": CHAT_TEMPLATE,
        # Loaders choose a tokenizer's class by it; nothing else here is a Llama.
        "config.json": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": MODEL_VOCABULARY,
            "max_position_embeddings": 131072,
            "eos_token_id": tokenizer.end_id,
        },
        "generation_config.json": {"eos_token_id": [tokenizer.end_id, tokenizer.special[TURN_END]]},
    }


def _tokenizer_json(tokenizer: BuiltinTokenizer) -> dict[str, Any]:
    letters = byte_letters()

    def named(data: bytes) -> str:
        return "".join(letters[value] for value in data)

    plain = tokenizer.tokens[: -len(SPECIAL)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, token in tokenizer.special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {named(token): index for index, token in enumerate(plain)},
            "merges": [[named(left), named(right)] for left, right in tokenizer.merges],
        },
    }


def byte_letters() -> list[str]:
    """List the letter of each byte in byte-level tokenizers: itself if visible, else one from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (value for value in range(256) if value not in visible)
    moved = {value: chr(0x100 + place) for place, value in enumerate(hidden)}
    return [moved.get(value, chr(value)) for value in range(256)]
