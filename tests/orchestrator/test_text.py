from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.orchestrator.text import IncrementalDecoder
from specdec.runner.tokenizer import Tokenizer
from tests.orchestrator.harness import TOKENIZER

REPLACEMENT = "\ufffd"

TEXTS = {
    "ascii": "plain text, 3 words",
    "emoji": "a 👩\u200d👩\u200d👧\u200d👦 family 🇩🇪 👍🏽!",
    "cjk": "统一码、日本語テキスト、한국어",
    "combining": unicodedata.normalize("NFD", "Crème brûlée, Ångström, ṩ") + "\u0301",
    "right-to-left": "שלום עולם, مرحبا بالعالم\u200f",
    "beyond the BMP": "𒀀𒁀 😀 \U00020000 \U0010ffff",
    "whitespace": "  two\t\n\n leading and trailing \u2003 ",
    "a real replacement character": "lost: \ufffd, twice: \ufffd\ufffd, end: \ufffd",
}
texts = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


def stream(tokens: list[int], prompt: list[int] | None = None, tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    """What each token gave out, and at last what was held back."""
    decoder = IncrementalDecoder(tokenizer, prompt or [])
    return [*(decoder.add(token) for token in tokens), decoder.finish()]


@texts
def test_pieces_join_to_the_whole_text(text: str) -> None:
    assert "".join(stream(list(text.encode()))) == text


@texts
def test_every_code_point_comes_with_its_last_byte_and_not_before(text: str) -> None:
    pieces = iter(stream(list(text.encode())))
    for char in text:
        given_out = [next(pieces) for _ in char.encode()]
        if REPLACEMENT in text:
            continue  # cannot be told from an incomplete code point: it may come later
        assert given_out == [""] * (len(char.encode()) - 1) + [char]
    if REPLACEMENT not in text:
        assert next(pieces) == ""


@texts
def test_the_text_goes_on_from_a_prompt_that_ends_anywhere(text: str) -> None:
    raw = text.encode()
    for cut in range(len(raw) + 1):
        joined = "".join(stream(list(raw[cut:]), prompt=list(raw[:cut])))
        whole_points = len(raw[:cut].decode("utf-8", "ignore"))
        complete = raw[:cut].decode("utf-8", "ignore").encode() == raw[:cut]
        if complete:
            assert joined == text[whole_points:]
        else:  # a code point that began in the prompt
            assert joined.endswith(text[whole_points + 1 :])


@given(st.text(max_size=40).filter(lambda text: REPLACEMENT not in text))
def test_any_text_comes_whole_and_never_with_a_premature_replacement(text: str) -> None:
    pieces = stream(list(text.encode()))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.binary(max_size=60))
def test_any_bytes_come_out_as_python_decodes_them(raw: bytes) -> None:
    assert "".join(stream(list(raw))) == raw.decode("utf-8", "replace")


@given(st.binary(min_size=1, max_size=60), st.data())
def test_what_was_given_out_is_never_taken_back(raw: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(raw)))
    decoder = IncrementalDecoder(TOKENIZER, [])
    given_out = "".join(decoder.add(byte) for byte in raw[:cut])
    # Whatever comes next, what is out must remain a beginning of the text.
    for later in (b"", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"a", b"\xff"):
        assert (raw[:cut] + later).decode("utf-8", "replace").startswith(given_out)


@pytest.mark.parametrize("tail", [b"\xe4", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xc3"])
def test_bytes_that_never_became_a_code_point_come_at_the_end(tail: bytes) -> None:
    pieces = stream(list(b"ok" + tail))
    assert "".join(pieces[:-1]) == "ok"
    assert pieces[-1] == REPLACEMENT


@pytest.mark.parametrize("noise", [b"\xff", b"\xe4", b"\x80", b"\xf0\x9f", b"\xe4\xbd\xc3"])
def test_a_long_run_of_invalid_bytes_is_not_held_back_for_ever(noise: bytes) -> None:
    raw = noise * 60
    pieces = stream(list(raw))
    whole = raw.decode("utf-8", "replace")
    assert "".join(pieces) == whole
    # Only what may still become a code point is held back, and that is a few bytes.
    assert len("".join(pieces[: len(raw) // 2])) >= len(whole) // 2 - 4
    assert len(pieces[-1]) <= 4


class CountingTokenizer(Tokenizer):
    def __init__(self) -> None:
        super().__init__(TOKENIZER._hf, TOKENIZER.eos_token_ids)
        self.num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("noise", [b"a", "你".encode(), b"\xff", b"\xe4", "👍".encode() + b"\x80", b"\xe4\xbd"])
def test_the_work_for_a_token_does_not_grow_with_the_text(noise: bytes) -> None:
    tokenizer = CountingTokenizer()
    stream(list(noise * 2000)[:2000], tokenizer=tokenizer)
    assert tokenizer.num_decoded < 2000 * 60


def test_tokens_that_end_one_code_point_and_begin_the_next_are_not_held_back() -> None:
    table = {"a": b"a", "first": b"\xe4", "middle": b"\xbd\xa0\xe4", "last": b"\xbd\xa0"}
    names = list(table)
    byte_chars = {byte: TOKENIZER._hf.convert_ids_to_tokens(byte) for byte in range(256)}
    vocabulary = {"".join(byte_chars[byte] for byte in table[name]): index for index, name in enumerate(names)}
    raw = RawTokenizer(models.WordLevel(vocab=vocabulary, unk_token="a"))
    raw.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), frozenset())
    tokens = [0, 1, *[2] * 50, 3]
    pieces = stream(tokens, tokenizer=tokenizer)
    assert "".join(pieces) == "a" + "你" * 51
    assert pieces[:3] == ["a", "", "你"]
    assert all(piece == "你" for piece in pieces[2:-1])


def test_special_tokens_have_no_text_and_do_no_harm() -> None:
    (end,) = TOKENIZER.eos_token_ids
    pieces = stream([end, *b"a", end, *"你".encode(), end, end, *b"b"])
    assert "".join(pieces) == "a你b"


def sentencepiece_like(*, byte_fallback: bool = False) -> Tokenizer:
    """Words begin with a mark that shows as a space, except at the beginning of a text."""
    words = ["<unk>", "▁The", "▁answer", "▁is", "▁4", "2", "▁", "."]
    fallbacks = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: index for index, word in enumerate([*words, *(fallbacks if byte_fallback else [])])}
    raw = RawTokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = (
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        if byte_fallback
        else decoders.Metaspace()
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), frozenset())


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_the_space_between_prompt_and_completion_is_kept(byte_fallback: bool) -> None:
    tokenizer = sentencepiece_like(byte_fallback=byte_fallback)
    assert tokenizer.decode([3, 4]) == "is 4", "the premise: a leading space is stripped"
    pieces = stream([3, 4, 5, 7], prompt=[1, 2], tokenizer=tokenizer)
    assert pieces == [" is", " 4", "2", ".", ""]


def test_spaces_survive_in_a_long_text() -> None:
    tokenizer = sentencepiece_like()
    tokens = [3, 4, 6, 6, 5, 7] * 20
    assert "".join(stream(tokens, prompt=[1, 2], tokenizer=tokenizer)) == " is 4  2." * 20


def test_code_points_spelled_in_bytes_come_whole() -> None:
    tokenizer = sentencepiece_like(byte_fallback=True)
    spelled = [8 + byte for byte in "你好👍é".encode()]
    pieces = stream([3, *spelled, 4], prompt=[1, 2], tokenizer=tokenizer)
    assert [piece for piece in pieces if piece] == [" is", "你", "好", "👍", "é", " 4"]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["你", "好", "👍", "é", "ß"]), max_size=30))
def test_long_spelled_text_comes_whole(chars: list[str]) -> None:
    tokenizer = sentencepiece_like(byte_fallback=True)
    text = "".join(chars)
    pieces = stream([8 + byte for byte in text.encode()], prompt=[1, 2], tokenizer=tokenizer)
    assert [piece for piece in pieces if piece] == chars
