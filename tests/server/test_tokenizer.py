"""The built-in tokenizer loses nothing, filler is worth exactly its tokens, and the export says the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.server.api.texts import TokenTexts
from understudy.server.outputs import Outputs
from understudy.server.tokenizer import builtin, open_tokenizer
from understudy.server.tokenizer.builtin import SPECIAL, BuiltinTokenizer
from understudy.server.tokenizer.export import byte_letters, export_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TOKENIZER = builtin()


@given(st.text())
def test_text_comes_back_whole(text: str) -> None:
    assert (
        TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False)
        == text.encode("utf-8", "replace").decode()
    )


@given(st.lists(st.sampled_from(TOKENIZER.words()), min_size=1, max_size=50))
def test_any_run_of_filler_words_is_cut_into_itself(tokens: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(tokens)) == tokens


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_pieces_of_a_stream_make_up_the_text(tokens: list[int]) -> None:
    pieces = TokenTexts(TOKENIZER).pieces(tokens, skip_special=False)
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special=False)


def test_special_tokens_in_text_are_parsed() -> None:
    ids = TOKENIZER.encode(f"a{SPECIAL[2]}b")
    assert TOKENIZER.special[SPECIAL[2]] in ids
    assert len(ids) == 3


def test_a_text_is_not_read_on_once_there_are_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = BuiltinTokenizer()
    read: list[bytes] = []
    encode = tokenizer._encode_piece

    def counted(data: bytes) -> Iterable[int]:
        read.append(data)
        return encode(data)

    monkeypatch.setattr(tokenizer, "_encode_piece", counted)
    for text in (
        " ".join(f"w{number}" for number in range(5000)),
        "<|im_end|>".join(map(str, range(10**6, 10**6 + 5000))),
    ):
        whole = BuiltinTokenizer().encode(text)
        read.clear()
        some = tokenizer.encode(text, enough=100)
        assert 100 <= len(some) < 130
        assert some == whole[: len(some)]
        assert len(read) <= 100


def test_the_same_prompt_has_the_same_answer_and_another_seed_another() -> None:
    outputs = Outputs(TOKENIZER)
    prompt = np.arange(5, dtype=np.uint32)
    one = outputs.answer(prompt, 30, asked=30)
    assert outputs.answer(prompt, 30, asked=30).tokens.tolist() == one.tokens.tolist()
    assert outputs.answer(prompt, 30, asked=30, seed=9).tokens.tolist() != one.tokens.tolist()
    assert outputs.answer(prompt, 200_000, asked=200_000).tokens.shape == (200_000,)
    assert not one.stops


def test_echo_and_recorded_answers(tmp_path: Path) -> None:
    prompt = np.array(TOKENIZER.encode("what is that?"), dtype=np.uint32)
    echo = Outputs(TOKENIZER, "echo").answer(prompt, 100, asked=None)
    assert TOKENIZER.decode(echo.tokens.tolist()) == "what is that?"
    assert echo.stops
    file = tmp_path / "answers.jsonl"
    file.write_bytes(msgspec.json.encode({"prompt": "is that", "response": "A dog."}) + b"\n")
    recorded = Outputs(TOKENIZER, "recorded", recorded=file).answer(prompt, 100, asked=None)
    assert TOKENIZER.decode(recorded.tokens.tolist()) == "A dog."
    file.write_text("{}")
    with pytest.raises(ConfigError, match="line 1"):
        Outputs(TOKENIZER, "recorded", recorded=file)


def test_the_export_has_every_file_in_both_layouts(tmp_path: Path) -> None:
    plain = export_tokenizer(tmp_path / "tok")
    hub = export_tokenizer(tmp_path / "hf", hub=True)
    assert {path.name for path in plain.iterdir()} == {path.name for path in hub.iterdir()}
    revision = (tmp_path / "hf/hub/models--understudy--tok/refs/main").read_text()
    assert hub.name == revision
    assert len(revision) == 40
    described = msgspec.json.decode((plain / "tokenizer.json").read_bytes())
    assert len(described["model"]["vocab"]) == len(TOKENIZER) - len(SPECIAL)
    assert len(set(byte_letters())) == 256
    assert msgspec.json.decode((plain / "config.json").read_bytes())["model_type"]


def test_hugging_faces_own_reader_cuts_text_in_the_same_way(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    other = open_tokenizer(str(export_tokenizer(tmp_path)))
    texts = [
        "The quick brown fox,  jumps over 12345 lazy dogs!\n\nÜber-straße — “ok”",
        "x" * 100 + "9" * 40 + " " * 30 + "!" * 40,
        "def f(x):\n\treturn x**2  # 日本語 🎉",
        SPECIAL[1] + "user\nhi" + SPECIAL[2],
        *(TOKENIZER.decode(np.random.default_rng(n).integers(0, 2900, 80).tolist()) for n in range(30)),
    ]
    for text in texts:
        assert other.encode(text) == TOKENIZER.encode(text)
    assert other.words()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="built-in"):
        open_tokenizer(str(tmp_path))
