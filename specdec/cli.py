"""The `specdec` command."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specdec.config import EngineConfig, load_engine_config
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.runner.pair import check_pair
from specdec.types import GenerationChunk, TokenOrigin

# Readable on dark and light ground, and told apart without colour too.
_STYLES = {
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.RECOVERED: "bold red",
    TokenOrigin.BONUS: "underline blue",
    TokenOrigin.PLAIN: "",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 when it failed, 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    status = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if options.command == "check":
            return _check(options, status)
        return _generate(options, status)
    except SpecdecError as error:
        status.print(Text(f"error: {error}", style="red"))
        return 1
    except KeyboardInterrupt:
        return 130


def _generate(options: argparse.Namespace, status: Console) -> int:
    """Stream a completion to the terminal, every token in the style of its origin."""
    config = _config(options)
    started = time.monotonic()
    with status.status("loading the models"):
        engine = Engine(config)
    with engine:
        loaded = time.monotonic()
        request = engine.request(
            options.prompt,
            chat=not options.raw,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            stop=options.stop,
            num_draft_tokens=options.num_draft_tokens,
            speculative=not options.plain,
        )
        console = Console(highlight=False, soft_wrap=True)
        chunks: list[GenerationChunk] = []
        first_token = loaded
        for chunk in engine.stream_request(request):
            first_token = first_token if chunks else time.monotonic()
            chunks.append(chunk)
            _show(console, chunk, engine)
        console.print()
        summary = _summary(chunks, time.monotonic() - first_token, request.sampling.seed)
        status.print(Text(f"{summary} · loaded in {loaded - started:.1f} s", style="dim"))
        if not options.plain:
            legend = Text("  ").join(Text(str(origin), style=_STYLES[origin]) for origin in TokenOrigin)
            status.print(legend)
    return 0


def _show(console: Console, chunk: GenerationChunk, engine: Engine) -> None:
    """Styled on a terminal, with tabs expanded and control characters left out; unchanged anywhere else."""
    if console.is_terminal:
        console.print(_styled(chunk, engine), end="")
    else:
        console.file.write(chunk.text)
        console.file.flush()


def _styled(chunk: GenerationChunk, engine: Engine) -> Text:
    """A chunk's text, coloured by origin.

    A chunk's text is that of its tokens unless something is held back; then it takes the style of the last token.
    """
    pieces = [engine.tokenizer.decode([token]) for token in chunk.token_ids]
    if "".join(pieces) != chunk.text:
        return Text(chunk.text, style=_STYLES[chunk.origins[-1]])
    return Text.assemble(*((piece, _STYLES[origin]) for piece, origin in zip(pieces, chunk.origins, strict=True)))


def _summary(chunks: list[GenerationChunk], seconds: float, seed: int) -> str:
    stats, num_tokens = chunks[-1].stats, sum(len(chunk.token_ids) for chunk in chunks)
    # The first chunk comes at the end of the prompt's computation; the rate is that of decoding after it.
    decoded = num_tokens - len(chunks[0].token_ids)
    rate = f"{decoded / seconds:.1f} tokens/s" if decoded and seconds > 0 else "one step"
    return (
        f"{num_tokens} tokens in {stats.num_steps} steps · {rate} · acceptance length {stats.acceptance_length:.2f} "
        f"({stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted) · "
        f"{chunks[-1].finish_reason} · seed {seed}"
    )


def _check(options: argparse.Namespace, status: Console) -> int:
    """Say what is wrong with a config and its pair of models."""
    config = _config(options)
    findings = check_pair(config)
    for finding in findings:
        style, word = ("red", "error") if finding.fatal else ("yellow", "warning")
        status.print(Text(f"{word}: {finding}", style=style))
    if any(finding.fatal for finding in findings):
        return 1
    status.print(Text(f"{config.served_model_name}: ready to serve", style="green"))
    return 0


def _config(options: argparse.Namespace) -> EngineConfig:
    """The config file asked for, else the one in this folder, else the demo pair."""
    default = Path("serve_config.yaml")
    path: Path | None = options.config
    if path is None and default.is_file():
        path = default
    return EngineConfig() if path is None else load_engine_config(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Exact speculative decoding.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config", type=Path, help="a Serve config, or its args alone (default: ./serve_config.yaml, else the demo)"
    )
    common.add_argument("--verbose", action="store_true", help="log what is being loaded")

    generate = commands.add_parser("generate", parents=[common], help="answer one prompt in this process, without Ray")
    generate.add_argument("prompt")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt; default: answer it as a chat message"
    )
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, help="0 keeps all (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0, help="0 keeps all (default)")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is none (default)")
    generate.add_argument("--seed", type=int, help="default: a random one, printed at the end")
    generate.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    generate.add_argument("--num-draft-tokens", type=int, help="draft tokens per step (default: as configured)")
    generate.add_argument("--plain", action="store_true", help="decode with the target alone")

    commands.add_parser("check", parents=[common], help="say what is wrong with a config, before anything serves")
    return parser


if __name__ == "__main__":
    sys.exit(main())
