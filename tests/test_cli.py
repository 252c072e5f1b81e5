from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import cli
from specdec.cli import main
from specdec.config import DEMO_TARGET, EngineConfig, load_engine_config
from specdec.engine import Engine
from specdec.types import FinishReason, GenerationChunk, GenerationRequest, SpeculativeStats, TokenOrigin
from tests.cli_config import write_config
from tests.models import make_tiny_llama

ACCEPTED, RECOVERED, PLAIN = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.PLAIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def config_path(folder: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path, folder)


def generate(config_path: Path, *arguments: str) -> int:
    return main(["generate", "abc", "--config", str(config_path), "--max-tokens", "24", *arguments])


def test_generate_streams_the_text_and_sums_up(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(config_path, "--temperature", "0.8", "--seed", "7", "--num-draft-tokens", "3") == 0
    captured = capsys.readouterr()
    with Engine(load_engine_config(config_path)) as engine:
        wanted = engine.generate("abc", chat=True, max_tokens=24, temperature=0.8, seed=7, num_draft_tokens=3)
    assert captured.out == wanted.text + "\n"
    numbers = re.search(
        r"(\d+) tokens in (\d+) steps .* acceptance length ([\d.]+) \((\d+) of (\d+) draft tokens accepted\)",
        captured.err,
    )
    assert numbers is not None, captured.err
    # How many steps it takes depends on when the draft is up; the text does not.
    num_tokens, num_steps, length, num_accepted, num_drafted = map(float, numbers.groups())
    assert num_tokens == len(wanted.token_ids)
    assert length == pytest.approx(1 + num_accepted / num_steps, abs=0.006)
    assert 0 < num_accepted < num_drafted
    assert str(wanted.finish_reason) in captured.err
    assert "seed 7" in captured.err
    for origin in TokenOrigin:
        assert origin in captured.err, "the styles are explained"


def test_the_text_does_not_depend_on_speculation_and_greedy_is_the_default(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arguments in ([], ["--plain"], ["--num-draft-tokens", "7"], ["--temperature", "0"]):
        assert generate(config_path, *arguments) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert generate(config_path, "--raw") == 0
    assert capsys.readouterr().out != texts[0], "by default the prompt is a chat message"


def test_plain_says_that_nothing_was_drafted(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(config_path, "--plain") == 0
    captured = capsys.readouterr()
    assert "0 of 0 draft tokens" in captured.err
    assert str(ACCEPTED) not in captured.err.replace("draft tokens accepted", ""), "no styles to explain"


def test_a_seed_that_was_not_given_is_told(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(config_path, "--temperature", "1") == 0
    first = capsys.readouterr()
    (seed,) = re.findall(r"seed (\d+)", first.err)
    assert generate(config_path, "--temperature", "1", "--seed", seed) == 0
    assert capsys.readouterr().out == first.out


def test_a_request_that_is_wrong_fails_with_the_reason(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(config_path, "--top-p", "2") == 1
    captured = capsys.readouterr()
    assert "error: top_p" in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


class TellingEngine:
    """Stands in for `Engine`: tells a given story, and remembers what was asked."""

    story: tuple[GenerationChunk, ...] = ()
    request_options: dict[str, object] = {}  # noqa: RUF012
    configs: list[EngineConfig] = []  # noqa: RUF012

    def __init__(self, config: EngineConfig) -> None:
        self.configs.append(config)
        self.tokenizer = self

    def __enter__(self) -> TellingEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def request(self, prompt: str, **options: object) -> GenerationRequest:
        type(self).request_options = {"prompt": prompt, **options}
        return GenerationRequest("r", (1,), 1)

    def stream_request(self, request: GenerationRequest) -> Iterator[GenerationChunk]:
        yield from self.story


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> type[TellingEngine]:
    monkeypatch.setattr(cli, "Engine", TellingEngine)
    monkeypatch.setattr(TellingEngine, "configs", [])
    return TellingEngine


def chunk(text: str, *origins: TokenOrigin, token_text: str | None = None, last: bool = False) -> GenerationChunk:
    return GenerationChunk(
        text=text,
        token_ids=tuple(map(ord, text if token_text is None else token_text)),
        origins=origins or (PLAIN,) * len(text),
        finish_reason=FinishReason.STOP if last else None,
        stats=SpeculativeStats(2, 4, 3),
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("one\n\n  two\n", id="lines"),
        pytest.param("word " * 80, id="longer than a terminal is wide"),
        pytest.param(" " * 200 + "x", id="more blanks than a terminal is wide"),
        pytest.param("if x:\n\treturn\ty\n", id="tabs"),
        pytest.param("[bold]not markup[/bold] [/] \\[x]", id="what looks like markup"),
        pytest.param(":smile: 👍 ﷺ 你好", id="emoji"),
        pytest.param("http://localhost:8000 'x' 1.5 None", id="what rich would highlight"),
        pytest.param("crlf\r\nform\ffeed", id="control characters"),
    ],
)
def test_the_text_arrives_unchanged(
    text: str, telling: type[TellingEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    half = len(text) // 2
    telling.story = (chunk(text[:half]), chunk(text[half:], last=True))
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr().out == text + "\n"


def styled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal is sent."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["generate", "x"]) == 0
    return capsys.readouterr().out


def test_origins_are_told_apart_by_style(
    telling: type[TellingEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = list(TokenOrigin)
    telling.story = (chunk("abcd", *origins, last=True),)
    out = styled(capsys, monkeypatch)
    styles = re.findall(r"((?:\x1b\[[\d;]+m)*)([abcd])", out)
    assert [letter for _, letter in styles] == list("abcd")
    assert len({style.replace("\x1b[0m", "") for style, _ in styles}) == len(origins)


def test_text_that_was_held_back_is_shown_whole(
    telling: type[TellingEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    telling.story = (
        chunk("", RECOVERED, token_text="a"),
        chunk("ab", ACCEPTED, token_text="b"),
        chunk("", PLAIN, token_text="c", last=True),
    )
    assert re.sub(r"\x1b\[[\d;]+m", "", styled(capsys, monkeypatch)) == "ab\n"


def test_options_reach_the_request(telling: type[TellingEngine], capsys: pytest.CaptureFixture[str]) -> None:
    telling.story = (chunk("x", last=True),)
    arguments = (
        "generate hi --raw --max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.2 --seed 4 --stop A --stop B --num-draft-tokens 2 --plain"
    )
    assert main(arguments.split()) == 0
    assert telling.request_options == {
        "prompt": "hi",
        "chat": False,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": 4,
        "stop": ["A", "B"],
        "num_draft_tokens": 2,
        "speculative": False,
    }


def test_the_config_is_that_of_this_folder_else_the_demo(
    telling: type[TellingEngine],
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    telling.story = (chunk("x", last=True),)
    monkeypatch.chdir(config_path.parent)
    assert main(["generate", "x"]) == 0
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    assert main(["generate", "x"]) == 0
    here, demo = telling.configs
    assert here == load_engine_config(config_path)
    assert demo.target.source == DEMO_TARGET


def test_an_interrupt_ends_quietly(
    telling: type[TellingEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: TellingEngine, request: GenerationRequest) -> Iterator[GenerationChunk]:
        yield chunk("x")
        raise KeyboardInterrupt

    monkeypatch.setattr(TellingEngine, "stream_request", interrupted)
    assert main(["generate", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err
