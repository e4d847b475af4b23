"""What is compiled before anything is timed: in processes side by side, which fill the compilers' caches for this one.

Four kinds of weights at three batches are some hundred kernels, and a compiled rival is most of a minute of one core. Weights
are random: code depends on sizes alone. Whatever fails here fails again where it is measured, and is reported there.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from whet import measure
from whet.child import Lost, run_to_end, stop_running
from whet.decode.bench import contender, rivals
from whet.decode.cache import free_bytes
from whet.decode.oracle import full_float32
from whet.decode.quantize import quantize
from whet.models.qwen3 import Qwen3, Qwen3Config, random_weights

LIMIT_S = 240.0
CONTEXT_BYTES = 2 << 30  # what a process takes on a GPU beside its weights
THREADS = 3  # of Inductor's compilers in each process: most of the work is one thread's tracing


@dataclass(frozen=True)
class Job:
    """One system with one kind of weights at one batch, after prompts of these lengths."""

    system: str
    quant: str
    batch: int
    contexts: tuple[int, ...]
    ahead: int  # tokens that follow a prompt


def jobs(ours: list[str], quants: list[str], batches: list[int], contexts: list[int], ahead: int) -> list[Job]:
    """Of the first, products depend on weights and batch, attention on the context; the code of others on nothing of these."""
    (first, *others), (shortest, *longer) = ours, sorted(set(contexts))
    made = [Job(first, "", batches[0], (context,), ahead) for context in reversed(longer)]
    made += [Job(first, quant, batch, (shortest,), ahead) for quant in ("", *quants) for batch in batches]
    return [*(Job(name, "", 1, (shortest,), ahead) for name in others), *made]


def rival_jobs(names: list[str], points: list[tuple[int, int]], ahead: int) -> list[Job]:
    """Those that are compiled and do not measure while they are: processes side by side would disturb that."""
    return [Job(name, "", batch, (context,), ahead) for name in names if name in rivals.AHEAD for batch, context in points]


def processes(model: Qwen3) -> int:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(1, min(os.cpu_count() or 1, free_bytes(model.embed.device) // (3 * weights + CONTEXT_BYTES)))


def prepare(model: Qwen3, wanted: list[Job], progress: Callable[[str, int, int], None]) -> dict:
    """Do the jobs, the long ones first. Says how long it took and which failed, with the reason."""
    begun, failed, side_by_side = measure.now(), [], processes(model)
    with ThreadPoolExecutor(side_by_side) as pool:
        running = {pool.submit(child, model, job): job for job in wanted}
        try:
            for i, one in enumerate(as_completed(running)):
                progress("compiling, processes side by side", i, len(running))
                if why := one.result():
                    failed.append(asdict(running[one]) | {"why": why})
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_running()
            raise
    return {"s": round(measure.now() - begun, 1), "jobs": len(wanted), "processes": side_by_side, "failed": failed}


def child(model: Qwen3, job: Job) -> str:
    """Nothing, or why the job failed."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path[0] = {root!r}; from whet.decode.bench.prepare import main; main()"
    where = {"device": str(model.embed.device), "dtype": str(model.embed.dtype).removeprefix("torch.")}
    config = asdict(model.c) | {"rope_scaling": dict(model.c.rope_scaling) if model.c.rope_scaling else None}
    env = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS)}
    given = json.dumps({"config": config, "job": asdict(job)} | where)
    try:
        return run_to_end([sys.executable, "-c", start], LIMIT_S, given, env).fault
    except Lost as e:
        return str(e)


def main() -> None:
    given = json.load(sys.stdin)
    config = Qwen3Config(**given["config"] | {"eos": tuple(given["config"]["eos"])})
    job = Job(**given["job"] | {"contexts": tuple(given["job"]["contexts"])})
    model = random_weights(config, device=given["device"], dtype=getattr(torch, given["dtype"])).requires_grad_(False)
    with full_float32():  # as the bench has set it when it compiles: Inductor's cache keeps the two settings apart
        pass
    with rivals.quiet():
        do(job, model)


def do(job: Job, model: Qwen3) -> None:
    """Everything that a bench asks of the system, once."""
    if job.system in rivals.RIVALS:
        import torch._inductor.config as inductor

        inductor.autotune_local_cache = False  # what is measured beside other processes is not kept
    if job.quant:
        quantize(model, job.quant)
    kind = {**contender.OURS, **rivals.RIVALS}[job.system]
    for context in job.contexts:
        system = kind(model, job.batch, context + job.ahead)
        where: dict[str, Any] = dict(dtype=torch.int64, device=model.embed.device)
        first = torch.zeros(job.batch, 1, **where)
        system.feed(torch.zeros(1, context, **where), first)
        system.forced(first)
        system.chain(1)
        system.close()
