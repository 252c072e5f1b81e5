from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


def test_the_bytes_of_all_tokens_are_the_text(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    text = " Hi , you ! 日本 🙂\n\n \ufffd don't"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert tokenizer.token_bytes(EOS_TOKEN_ID) == b"<|end|>"


def test_sentencepiece_tokens_keep_their_space_and_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "\u2581the": 1, "re": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "\u2581": 6}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), frozenset())
    assert b"".join(map(tokenizer.token_bytes, [1, 2, 3, 4, 5, 6, 2])).decode() == " there€ re"


def test_bad_words_are_tokenized_as_given_and_after_a_space(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    ab, space = tuple(tokenizer.encode("ab")), tokenizer.encode(" ")[0]
    assert tokenizer.encode_bad_words(["ab"]) == (ab, (space, *ab))
    assert set(tokenizer.encode_bad_words([" ab", "ab"])) == {ab, (space, *ab)}
    assert tokenizer.encode_bad_words([]) == ()
    for empty in ("", "  "):
        with pytest.raises(InvalidRequestError, match="empty") as caught:
            tokenizer.encode_bad_words(["ab", empty])
        assert caught.value.param == "bad_words"
