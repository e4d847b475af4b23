"""What else a benchmark of the decoder reports: a fresh process's time to its first token, and what quantising costs."""

import contextlib
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from whet.child import Lost, run_to_end
from whet.decode import load
from whet.decode.bench import quality, rivals
from whet.decode.bench.contender import GraphContender, PersistentContender
from whet.decode.quantize import QUANTS
from whet.figures import error_line
from whet.models.qwen3 import Qwen3, kernels

PROMPT = " ".join(str(i) for i in range(1, 33))  # tokens as numbers, or the text itself where there is a tokenizer
WARM = 3  # starts with the weights in the system's page cache
LIMIT_S = 600.0
ONE_KERNEL = "one kernel"
PARTS = ("imported_s", "loaded_s", "first_token_s", "since_start_s")


def starts(model: Qwen3, where: Path | None, device: str = "auto") -> dict:
    """Seconds from the start of a process to its first token. where: the weights on disk; None: the model's are saved first.

    first   a process that compiles whatever is not yet, as a machine's first does; after it nothing is left to compile
    """
    with contextlib.ExitStack() as stack:
        if where is None:
            where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whet-weights-"))) / "model"
            rivals.save_hf(model, where)
        files = [where] if where.is_file() else sorted(where.glob("*.safetensors"))
        first = child(where, device)
        dropped, size = all(drop_from_page_cache(f) for f in files), sum(f.stat().st_size for f in files)
        cold = child(where, device)
        warm = [child(where, device) for _ in range(WARM)]
    middle = sorted(warm, key=lambda r: r["since_start_s"])[WARM // 2]
    source_of_cold = "read from disk" if dropped else "perhaps in the system's page cache"
    return {"first": first, "cold": cold, "warm": middle, "cold_is": source_of_cold, "bytes": size}


def drop_from_page_cache(file: Path) -> bool:
    """Ask the system to drop a file from its page cache, so that the next reader waits for the disk."""
    try:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, AttributeError):
        return False
    return True


def child(where: Path, device: str) -> dict:
    """`whet generate` of one token in a process of its own; it says itself how old it was at each point.

    Without verification: the first start of all takes that long more, any later one reads the verdict from the lock.
    """
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path[0] = {root!r}; from whet.commands import main; main()"
    options = ["--max-new-tokens", "1", "--raw", "--ignore-eos", "--device", device, "--json", "--no-verify"]
    command = [sys.executable, "-c", start, "generate", str(where), PROMPT, *options]
    try:
        done = run_to_end(command, LIMIT_S)
    except Lost as e:
        raise ValueError(f"whet generate did not start: {e}") from None
    if done.fault:
        raise ValueError(f"whet generate did not start: {done.fault}")
    answer = json.loads(done.stdout)
    return {name: round(answer[name], 3) for name in PARTS}


def measure_quality(name: str, device: str, quants: list[str], progress: Callable[[str, int, int], None]) -> dict:
    """Perplexity, KL and top-1 against float32, of the decoding path as it is, of each quant, and of Transformers in bfloat16.

    On real text: with the model that was named where it has a tokenizer, else with SmolLM2-135M where it is installed, else
    with random weights and random tokens, whose KL means something and whose perplexity does not.
    """
    build, text, about = source(name, device)
    model = build()
    gpu = model.embed.device.type == "cuda"
    count = 4096 if gpu else 256
    if text is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.c.vocab, (count + 1,), generator=generator).tolist()
    else:
        tokens = text.encode(quality.text_sample(6 * count))[: count + 1]
    run = by_kernels if gpu else quality.plain
    del model
    progress("quality: each quant", 0, 2)
    found = quality.compare_quants(build, tokens, quants or QUANTS, run=run, batch=8 if gpu else 1, more=kernel_of)
    base = next(iter(found))
    noise = found[base].error
    result: dict[str, Any] = about | {"path": "token by token, as it decodes" if gpu else "the plain forward", "base": base}
    progress("quality: transformers", 1, 2)
    try:
        theirs = theirs_of(build(), tokens, batch=8 if gpu else 1)
        verdict = quality.not_worse(found[base], theirs)
        result |= {"verdict": plain_json(verdict.as_dict())}
        if kernel := found.get(f"{base}, {ONE_KERNEL}"):
            result |= {"kernel_verdict": plain_json(quality.not_worse(kernel, theirs).as_dict())}
        found = {base: found[base], "transformers": theirs} | found
    except Exception as e:
        result |= {"transformers": f"left out: {error_line(e)}"}
    return result | {"rows": [plain_json(s.as_dict(noise)) | {"name": n} for n, s in found.items()]}


def by_kernels(model: Qwen3) -> quality.Logits:
    """Token by token, by whet's kernels: what is scored here is what says whether they are right."""
    model.ops = model.ops if model.own_ops else kernels()
    return quality.cached(model)


def kernel_of(model: Qwen3) -> dict[str, quality.Logits]:
    """The persistent kernel, where it takes the model."""
    if PersistentContender.refused(model, 1):
        return {}
    return {ONE_KERNEL: in_steps(PersistentContender(model, 1, quality.WINDOW))}


def in_steps(contender: GraphContender) -> quality.Logits:
    """Logits of texts from their beginning: one row after another, each token in a step of its own."""
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in tokens.split(1):
            contender.cached_tokens, contender.first = 0, row[:, :1]
            rows.append(contender.forced(row))
        return torch.cat(rows)

    return logits


def source(name: str, device: str) -> tuple[Callable[[], Qwen3], Any, dict]:
    """How to build the model, its text or None, and what to say about both."""
    given = dict(device=device, dtype="bfloat16")
    paths = [Path(name).expanduser()] if Path(name).expanduser().exists() else []
    if not paths:
        with contextlib.suppress(ValueError):
            paths = [load.smollm2()]
    if paths:
        build = functools.partial(load.open_model, paths[0], **given)
        text = build()[1]
        on = "docstrings of Python's standard library" if text else "random tokens"
        return (lambda: build()[0]), text, {"model": paths[0].stem, "weights": "real", "text": on}
    return (lambda: load.open_model(random_weights=name, **given)[0]), None, {
        "model": name, "weights": "random", "text": "random tokens",
    }


def theirs_of(model: Qwen3, tokens: list[int], batch: int) -> quality.Scores:
    """Transformers' eager model of the same weights on the same text, against the same reference."""
    with rivals.quiet():
        module = rivals.transformers_model(model)
        reference = quality.plain(quality.float32_reference(model))
        run = {"transformers": lambda t: module(input_ids=t, use_cache=False).logits}
        return quality.score(run, reference, tokens, batch=batch, device=model.embed.device)["transformers"]


def plain_json(found: dict) -> dict:
    """JSON has neither NaN nor infinity."""
    return dict(pairs(found))


def pairs(found: dict) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            value = plain_json(value)
        yield name, None if isinstance(value, float) and not math.isfinite(value) else value
