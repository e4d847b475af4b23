"""whet generate"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from whet import interrupts
from whet.commands._console import Json, console, plain_errors, progress_bar
from whet.commands._options import Device, option

Words = Annotated[list[str] | None, typer.Argument(
    metavar="[MODEL] PROMPT", help="A Hugging Face folder or GGUF file (default: SmolLM2-135M if installed), and a prompt.",
)]
MaxNew = Annotated[int, option("Tokens to generate at most.")]
Temperature = Annotated[float, option("0, the default, takes the likeliest token; above, one is drawn.", show_default=False)]
TopK = Annotated[int, option("Draw among the k likeliest tokens; 0, the default: among all.", show_default=False)]
TopP = Annotated[float, option("Draw among the likeliest tokens that reach this share; 1: among all.")]
Seed = Annotated[int, option("The same seed draws the same text (default 0).", show_default=False)]
Quant = Annotated[str | None, option("int8, int4 or fp8: weights made smaller at load (default: as they are).")]
Speculate = Annotated[str | None, option("ngram: guess from the text so far; the tokens stay the same (default: off).")]
How = Annotated[str, option("auto, graph or persistent: how greedy tokens are decoded (default auto).", "--path")]
Weights = Annotated[str, option(
    "bfloat16, float16 or float32 (default auto: float32 on a CPU, bfloat16 on a GPU).", "--dtype", show_default=False,
)]
RandomWeights = Annotated[str | None, option("qwen3:0.6b, say, in place of MODEL (default: none).")]
Chat = Annotated[bool | None, option("By the model's chat template or not (default: if it has one).", "--chat/--raw")]
IgnoreEos = Annotated[bool, option("Go on past the model's end tokens (default off).", "--ignore-eos")]
Verify = Annotated[bool, option(
    "Verify the decode kernels when a model of this shape is first met on this GPU (default on), or run them as they are.",
    "--verify/--no-verify", show_default=False,
)]


def split_model_and_prompt(words: list[str], random_weights: str | None) -> tuple[str | None, str]:
    """(model or None, prompt): a folder or GGUF file that comes first is the model."""
    if random_weights is not None:
        if len(words) > 1:
            raise ValueError(f"generate: --random-weights takes a prompt alone, got {len(words)} arguments")
        model, rest = None, words
    elif len(words) > 1 or words and is_model(words[0]):
        model, rest = words[0], words[1:]
    else:
        model, rest = None, words
    if not rest and model is not None and not Path(model).expanduser().exists():
        raise ValueError(f"generate: {model}: there is no such file")
    if not rest:
        raise ValueError('generate: there is no prompt; whet generate MODEL "prompt", or - to read it from standard input')
    if len(rest) > 1:
        raise ValueError(f"generate: one prompt, got {len(rest)} arguments after the model; put the prompt in quotes")
    prompt = standard_input() if rest[0] == "-" else rest[0]
    if not prompt.strip():
        raise ValueError("generate: the prompt is empty")
    return model, prompt


def standard_input() -> str:
    """All of it, without the newline that ends its last line."""
    if sys.stdin is None:
        typer.echo("whet: generate: standard input is closed; give the prompt itself, not -", err=True)
        raise typer.Exit(1)
    try:
        read = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"generate: standard input must be UTF-8, got byte 0x{e.object[e.start]:02x} at {e.start}") from None
    return read.replace("\r\n", "\n").removesuffix("\n")


def is_model(text: str) -> bool:
    return text.endswith(".gguf") or Path(text).expanduser().is_dir()


def asked_of(llm: Any, prompt: str, chat: bool | None) -> Any:
    """Messages for the chat template where there is one, unless --raw; numbers as tokens where there is no tokenizer."""
    templated = getattr(llm.text, "template", None) is not None
    if chat or (chat is None and templated):
        return [{"role": "user", "content": prompt}]
    words = prompt.split()
    if not hasattr(llm.text, "tokenizer") and words and all(w.isdecimal() for w in words):
        return [int(w) for w in words]
    return prompt


class Answer:
    """One answer as it comes, with what the command prints and keeps about it."""

    def __init__(self, began_s: float, loaded_s: float, show: bool):
        self.began_s, self.loaded_s, self.show = began_s, loaded_s, show
        self.first_s: float | None = None
        self.stopped = False
        self.completion: Any = None

    def take(self, stream: Any) -> None:
        """Everything that comes; Ctrl-C ends it with what there is."""
        from whet import measure

        try:
            for piece in stream:
                self.first_s = self.first_s or measure.since_start()
                if self.show:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            self.stopped = True
        stream.close()
        self.completion = stream.completion
        if self.show and self.completion.tokens:
            sys.stdout.write("\n")
        if self.completion.reason == "error" and not self.stopped:
            raise ValueError(self.completion.error)

    def as_dict(self) -> dict:
        from whet import measure

        made, roof = self.completion, measure.known_ceilings()
        floor = made.bytes_per_token / (roof.copy_gbs * 1e9) if made.bytes_per_token and roof else None
        reason, error = ("interrupted", None) if self.stopped else (made.reason, made.error)
        return asdict(made) | {
            "reason": reason, "error": error, "tokens_per_s": made.tokens_per_s, "floor_share": made.floor_share,
            "floor_s": floor, "imported_s": self.began_s, "loaded_s": self.loaded_s, "since_start_s": self.first_s,
        }


def command(
    words: Words = None, max_new_tokens: MaxNew = 256, temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0,
    seed: Seed = 0, quant: Quant = None, speculate: Speculate = None, path: How = "auto",
    dtype: Weights = "auto", random_weights: RandomWeights = None, chat: Chat = None, ignore_eos: IgnoreEos = False,
    verify: Verify = True, device: Device = "auto", as_json: Json = False,
):
    """Text from a prompt as it comes, then tokens/s, seconds to the first token, and the share of the bandwidth floor.

    Example: whet generate --random-weights qwen3:tiny "1 2 3" --max-new-tokens 8
    """
    from whet import measure
    from whet.report import decode as decode_tables

    began = measure.since_start()
    options: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=ignore_eos)
    options |= dict(max_new_tokens=max_new_tokens)
    with plain_errors("nothing was generated yet"):
        model, prompt = split_model_and_prompt(words or [], random_weights)
        from whet.decode.engine import LLM, Options  # after what needs no model

        Options(**options)
        if speculate is not None and temperature > 0:
            raise ValueError(f"generate: --speculate needs temperature 0, got {temperature}; leave out --speculate")
        how: dict[str, Any] = dict(dtype=dtype, quant=quant, speculate=speculate, path=path, random_weights=random_weights)
        with progress_bar(not as_json) as progress:
            llm = LLM(model, device=device, max_batch=1, verify=verify, progress=progress, **how)
        answer = Answer(began, measure.since_start() - began, not as_json)
        stream = llm.stream(asked_of(llm, prompt, chat), **options)
        if random_weights is not None:
            typer.echo("whet: the weights are random, so the output is token numbers without meaning", err=True)
        if temperature == 0 and (top_k, top_p, seed) != (0, 1.0, 0):
            typer.echo("whet: --top-k, --top-p and --seed have no effect at temperature 0; give --temperature", err=True)
        if quant is not None and llm.device.type == "cpu":
            typer.echo(f"whet: on a CPU {quant} weights are widened for each product, and decode slower", err=True)
        answer.take(stream)
        made = answer.as_dict()
    if as_json:
        typer.echo(json.dumps(made, indent=1))
    else:
        for line in decode_tables.summary_lines(made):
            console.print(line)
    if answer.stopped:
        typer.echo(f"whet: stopped after {len(made['tokens'])} tokens", err=True)
        raise typer.Exit(interrupts.code())
