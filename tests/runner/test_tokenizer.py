from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specdec.errors import InvalidRequestError
from specdec.runner.tokenizer import Tokenizer
from tests.models import EOS_TOKEN_ID, TOKENIZER_VOCAB_SIZE, TURN_TOKEN_ID, save_tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_tokenizer(tmp_path)


def tokenizer_in(folder: Path) -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(folder), frozenset({EOS_TOKEN_ID}))


def test_text_survives_the_round_trip(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    text = " Hi , you ! 日本 🙂\n\n don't"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == TOKENIZER_VOCAB_SIZE


def test_special_tokens_are_not_text(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    assert tokenizer.decode([*tokenizer.encode("a"), EOS_TOKEN_ID, *tokenizer.encode("b")]) == "ab"


def test_an_incomplete_code_point_shows_as_replacement(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_a_conversation_ends_at_the_assistants_turn(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [
        TURN_TOKEN_ID,
        *tokenizer.encode("user: hi"),
        EOS_TOKEN_ID,
        TURN_TOKEN_ID,
        *tokenizer.encode("assistant: "),
    ]


def test_no_template_and_a_refusing_template_are_told(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('system comes first') }}")
    with pytest.raises(InvalidRequestError, match="refuses the messages: system comes first") as raised:
        tokenizer_in(folder).encode_chat([{"role": "user", "content": "hi"}])
    assert raised.value.param == "messages"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequestError, match="no chat template; use /v1/completions"):
        tokenizer_in(folder).encode_chat([{"role": "user", "content": "hi"}])


def test_the_fingerprint_is_that_of_the_vocabulary(tmp_path: Path) -> None:
    one, same, other = (
        tokenizer_in(save_tiny_tokenizer(tmp_path / name, extra_tokens=extra)).fingerprint()
        for name, extra in (("a", ["<x>"]), ("b", ["<x>"]), ("c", ["<y>"]))
    )
    assert one == same != other
