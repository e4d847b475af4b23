"""The decoder's commands: generate, and bench decode."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from whet import machine, measure
from whet.report import decode as decode_tables
from whet.report import record
from whet.terminal import Json, Records, console, emit, plain_errors, progress_bar

GPU_CONTEXTS, GPU_BATCHES = "128,1024,4096,16384", "1,8,64"
CPU_CONTEXTS, CPU_BATCHES = "32,128", "1,2"


def option(help: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, **limits)


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
RandomWeights = Annotated[str | None, option("qwen3:0.6b, say, in place of MODEL (default: none).")]
Chat = Annotated[bool | None, option("By the model's chat template or not (default: if it has one).", "--chat/--raw")]
IgnoreEos = Annotated[bool, option("Go on past the model's end tokens (default off).", "--ignore-eos")]
Verify = Annotated[bool, option(
    "Verify the decode kernels when a model of this shape is first met on this GPU (default on), or run them as they are.",
    "--verify/--no-verify", show_default=False,
)]
Device = Annotated[str, option("auto (the GPU where there is one), cpu or cuda.")]

Model = Annotated[str | None, option("A size for random weights, or a folder (default qwen3:0.6b; on a CPU qwen3:tiny).")]
Context = Annotated[str | None, option(f"Tokens in the cache (default {GPU_CONTEXTS}; on a CPU {CPU_CONTEXTS}).")]
Batch = Annotated[str | None, option(f"Rows decoded at once (default {GPU_BATCHES}; on a CPU {CPU_BATCHES}).")]
Quants = Annotated[str, option("int8,int4,fp8: weights to time beside the model's own (default: none).")]
Rivals = Annotated[str | None, option(
    "transformers, transformers-static, gpt-fast, gpt-fast-tuned, all or none (default all; on a CPU transformers)."
)]
SkipRivals = Annotated[bool, option("The same as --rivals none (default off).", "--skip-rivals")]
Cross = Annotated[bool, option("Contexts at the first batch, batches at the first context (default all at all).", "--cross")]
RivalContext = Annotated[str | None, option("Those of --context that rivals are timed at, with the first batch (default all).")]
RivalBatch = Annotated[str | None, option("Those of --batch that rivals are timed at, with the first context (default all).")]
RivalSeconds = Annotated[float, option("No rival is begun after this many seconds; a point takes half a minute.", min=0.0)]
Quality = Annotated[bool, option("Perplexity, KL and top-1 of each quant too (default off).", "--quality")]
Start = Annotated[bool, option("Time fresh processes to their first token.", "--start/--no-start")]
Tokens = Annotated[int, option("Tokens in a timed run.")]
Seconds = Annotated[float, option("Measuring time per system and point, seconds.", min=0.0)]
Name = Annotated[str, option("Name of the record (default: decode, the model and the quants).")]


def told_apart(words: list[str], random_weights: str | None) -> tuple[str | None, str]:
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


class Telling:
    """One answer as it comes, with what the command prints and keeps about it."""

    def __init__(self, began_s: float, loaded_s: float, show: bool):
        self.began_s, self.loaded_s, self.show = began_s, loaded_s, show
        self.first_s: float | None = None
        self.stopped = False
        self.completion: Any = None

    def take(self, stream: Any) -> None:
        """Everything that comes; Ctrl-C ends it with what there is."""
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
        made, roof = self.completion, measure.known_ceilings()
        floor = made.bytes_per_token / (roof.copy_gbs * 1e9) if made.bytes_per_token and roof else None
        reason, error = ("interrupted", None) if self.stopped else (made.reason, made.error)
        return asdict(made) | {
            "reason": reason, "error": error, "tokens_per_s": made.tokens_per_s, "floor_share": made.floor_share,
            "floor_s": floor, "imported_s": self.began_s, "loaded_s": self.loaded_s, "since_start_s": self.first_s,
        }


def generate(
    words: Words = None, max_new_tokens: MaxNew = 256, temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0,
    seed: Seed = 0, quant: Quant = None, speculate: Speculate = None, path: How = "auto",
    random_weights: RandomWeights = None, chat: Chat = None, ignore_eos: IgnoreEos = False, verify: Verify = True,
    device: Device = "auto", as_json: Json = False,
):
    """Text from a prompt as it comes, then tokens/s, seconds to the first token, and the share of the bandwidth floor.

    Example: whet generate --random-weights qwen3:tiny "1 2 3" --max-new-tokens 8
    """
    began = measure.since_start()
    options: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=ignore_eos)
    options |= dict(max_new_tokens=max_new_tokens)
    with plain_errors("nothing was generated yet"):
        model, prompt = told_apart(words or [], random_weights)
        from whet.decode.engine import LLM, Options  # after what needs no model

        Options(**options)
        if speculate is not None and temperature > 0:
            raise ValueError(f"generate: --speculate needs temperature 0, got {temperature}; leave out --speculate")
        how: dict[str, Any] = dict(quant=quant, speculate=speculate, path=path, random_weights=random_weights)
        with progress_bar(not as_json) as progress:
            llm = LLM(model, device=device, max_batch=1, verify=verify, progress=progress, **how)
        telling = Telling(began, measure.since_start() - began, not as_json)
        stream = llm.stream(asked_of(llm, prompt, chat), **options)
        if temperature == 0 and (top_k, top_p, seed) != (0, 1.0, 0):
            typer.echo("whet: --top-k, --top-p and --seed have no effect at temperature 0; give --temperature", err=True)
        if quant is not None and llm.device.type == "cpu":
            typer.echo(f"whet: on a CPU {quant} weights are widened for each product, and decode slower", err=True)
        telling.take(stream)
        made = telling.as_dict()
    if as_json:
        typer.echo(json.dumps(made, indent=1))
    else:
        for line in decode_tables.told(made):
            console.print(line)
    if telling.stopped:
        typer.echo(f"whet: stopped after {len(made['tokens'])} tokens", err=True)
        raise typer.Exit(130)


def numbers(text: str, option: str) -> list[int]:
    """'128,1024' -> [128, 1024]."""
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"bench decode: --{option} must be whole numbers from 1 on with commas between, got {text!r}")
    return list(dict.fromkeys(int(p) for p in parts))


def names(text: str) -> list[str]:
    return list(dict.fromkeys(p.strip() for p in text.split(",") if p.strip()))


def asked_for(model: str | None, context: str | None, batch: str | None, rivals: str | None, device: str, **rest: Any) -> Any:
    """What to measure. What was left open depends on whether there is a GPU: a CPU gets a small model and no compiler."""
    import torch

    from whet.decode.bench import rivals as others
    from whet.decode.bench import run as bench  # and with it the engine, which other commands do not wait for

    gpu = torch.cuda.is_available() and not device.startswith("cpu")
    return bench.Asked(
        model=model or ("qwen3:0.6b" if gpu else "qwen3:tiny"), device=device,
        contexts=numbers(context or (GPU_CONTEXTS if gpu else CPU_CONTEXTS), "context"),
        batches=numbers(batch or (GPU_BATCHES if gpu else CPU_BATCHES), "batch"),
        rivals=others.parse(rivals or ("all" if gpu else "transformers")), **rest,
    )


def bench_decode(
    model: Model = None, context: Context = None, batch: Batch = None, cross: Cross = False, quant: Quants = "",
    rivals: Rivals = None, skip_rivals: SkipRivals = False, rival_context: RivalContext = None, rival_batch: RivalBatch = None,
    rival_seconds: RivalSeconds = 1200.0, quality: Quality = False, start: Start = True, tokens: Tokens = 32,
    seconds: Seconds = 1.0, device: Device = "auto", records: Records = "records", name: Name = "", as_json: Json = False,
):
    """Tokens/s, TB/s and share of the bandwidth floor of whet's decoder and its rivals: verified, then timed in turns.

    Example: whet bench decode --context 16 --batch 1 --tokens 4 --seconds 0.01 --skip-rivals --no-start
    """
    kept = Kept(records)
    with plain_errors("nothing was measured yet, so there is nothing to keep"), progress_bar(not as_json) as progress:
        if skip_rivals and rivals:
            raise ValueError(f"bench decode: --skip-rivals and --rivals exclude each other, got both, --rivals {rivals}")
        asked = asked_for(
            model, context, batch, "none" if skip_rivals else rivals, device, quants=names(quant), tokens=tokens,
            seconds=seconds, rival_seconds=rival_seconds, start=start, quality=quality, cross=cross,
            rival_contexts=numbers(rival_context, "rival-context") if rival_context else [],
            rival_batches=numbers(rival_batch, "rival-batch") if rival_batch else [],
        )
        kept.name = name or " ".join(["decode", Path(asked.model).name, *asked.quants])
        kept.command = " ".join(["whet bench decode", *flags(asked)])
        stopped = kept.stopped_early(asked, progress)
    emit(kept.made, as_json, records, kept.name, lambda: decode_tables.show(console, kept.made["measured"]))
    if stopped:
        typer.echo("whet: stopped; what was measured until then is in the record", err=True)
        raise typer.Exit(130)


class Kept:
    """The record of a long run, written after every part of it."""

    def __init__(self, folder: str):
        self.folder, self.name, self.command = folder, "", ""
        self.made: dict[str, Any] = {}

    def __call__(self, measured: dict) -> None:
        versions = {"versions": {"transformers": machine.version("transformers")}}
        self.made = record.make(self.command, measured | versions)
        record.write(self.made, self.folder, self.name)

    def stopped_early(self, asked: Any, progress: Callable) -> bool:
        """Do the work; True if it was stopped with something already timed, which is then kept."""
        from whet.decode.bench.run import Bench

        bench = Bench(asked, self, progress)
        try:
            bench.run()
        except KeyboardInterrupt:
            if not any(r.get("ms") for r in bench.rows.values()):
                raise
            bench.save(stopped=True)
            return True
        return False


def flags(asked: Any) -> list[str]:
    """The options that give the same run again."""
    lists = {"context": asked.contexts, "batch": asked.batches, "quant": asked.quants, "rivals": asked.rivals or ["none"]}
    lists |= {"rival-context": asked.rival_contexts, "rival-batch": asked.rival_batches}
    given = [f"--{k} {','.join(map(str, v))}" for k, v in lists.items() if v]
    given_or_not = {"--cross": asked.cross, "--quality": asked.quality, "--no-start": not asked.start}
    switches = [name for name, given in given_or_not.items() if given]
    return [f"--model {asked.model}", *given, f"--tokens {asked.tokens} --seconds {asked.seconds:g}", *switches]


COMMANDS: dict[str, Callable] = {"generate": generate, "bench decode": bench_decode}
