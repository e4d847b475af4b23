"""whet bench decode"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from whet import interrupts
from whet.commands._console import Json, Records, comma_list, console, emit, plain_errors, progress_bar
from whet.commands._options import Device, option

GPU_CONTEXTS, GPU_BATCHES = "128,1024,4096,16384", "1,8,64"
CPU_CONTEXTS, CPU_BATCHES = "32,128", "1,2"

Model = Annotated[str | None, option("A size for random weights, or a folder (default qwen3:0.6b; on a CPU qwen3:tiny).")]
Context = Annotated[str | None, option(f"Tokens in the cache (default {GPU_CONTEXTS}; on a CPU {CPU_CONTEXTS}).")]
Batch = Annotated[str | None, option(f"Rows decoded at once (default {GPU_BATCHES}; on a CPU {CPU_BATCHES}).")]
Quants = Annotated[str, option("int8,int4,fp8: weights to time beside the model's own (default: none).")]
Rivals = Annotated[str | None, option(
    "transformers, transformers-optimized, transformers-static, gpt-fast, gpt-fast-tuned, all or none "
    "(default all; on a CPU transformers)."
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


def command(
    model: Model = None, context: Context = None, batch: Batch = None, cross: Cross = False, quant: Quants = "",
    rivals: Rivals = None, skip_rivals: SkipRivals = False, rival_context: RivalContext = None, rival_batch: RivalBatch = None,
    rival_seconds: RivalSeconds = 1200.0, quality: Quality = False, start: Start = True, tokens: Tokens = 32,
    seconds: Seconds = 1.0, device: Device = "auto", records: Records = "records", name: Name = "", as_json: Json = False,
):
    """Tokens/s, TB/s and share of the bandwidth floor of whet's decoder and its rivals: verified, then timed in turns.

    Example: whet bench decode --context 16 --batch 1 --tokens 4 --seconds 0.01 --skip-rivals --no-start
    """
    from whet.report import decode as decode_tables

    kept = BenchRecord(records)
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
        raise typer.Exit(interrupts.code())


def numbers(text: str, option: str) -> list[int]:
    """'128,1024' -> [128, 1024]."""
    parts = comma_list(text)
    if not parts or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"bench decode: --{option} must be whole numbers from 1 on with commas between, got {text!r}")
    return list(dict.fromkeys(int(p) for p in parts))


def names(text: str) -> list[str]:
    return list(dict.fromkeys(comma_list(text)))


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


class BenchRecord:
    """The record of a long run, written after every part of it."""

    def __init__(self, folder: str):
        self.folder, self.name, self.command = folder, "", ""
        self.made: dict[str, Any] = {}

    def __call__(self, measured: dict) -> None:
        from whet import machine
        from whet.report import record

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
