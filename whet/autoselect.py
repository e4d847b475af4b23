"""Kernel selection at the start of training, as four plain calls: PyTorch or Triton, for RMSNorm and for RoPE.

    config = ModelConfig(batch_size=16, max_seq_len=256, d_model=384, n_heads=8)
    auto_select_kernels(config)          # sets config.use_triton_rmsnorm and config.use_triton_rotary, and says why
    benchmark_rms_norm(batch_size=32, seq_len=512, d_model=768)["use_triton"]

What is timed is forward and backward, and only after values and gradients passed against float64: a kernel that is
fast and wrong is never picked. Off with benchmark_kernels=False; forced with use_triton_rmsnorm / use_triton_rotary.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from whet import machine
from whet.lock import Lock
from whet.op import DTYPES, Call, Op, discover
from whet.tune import modes_here, tune

MANUAL = {  # batch, length, width
    "cuda": ((16, 256, 384), (32, 512, 768), (8, 2048, 2048)),
    "cpu": ((2, 64, 384), (4, 128, 768)),
}
RULES = {"use_triton_rmsnorm": "RMSNorm", "use_triton_rotary": "Rotary"}


@dataclass
class ModelConfig:
    """The fields auto_select_kernels reads; any object with the same names will do.

    use_triton_*: None lets the benchmark decide, True forces Triton, False forces PyTorch.
    """

    batch_size: int = 16
    max_seq_len: int = 256
    d_model: int = 384
    n_heads: int = 8
    dtype: str = "bfloat16"
    benchmark_kernels: bool = True
    use_triton_rmsnorm: bool | None = None
    use_triton_rotary: bool | None = None


def _sizes(**named: int) -> None:
    for name, value in named.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _benchmark(what: str, call: Call, mode: str | None, lock: Lock | str | None) -> dict:
    if call.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {list(DTYPES)}, got {call.dtype!r}")
    mode = mode or modes_here()[0]
    if mode not in modes_here():
        raise ValueError(f"mode must be one of {modes_here()} on this machine, got {mode!r}")
    op, lock = discover()[call.op], Lock() if lock is None else Lock.of(lock)
    # Every option spelled out, as a recorded call has them: what is saved in a lock is then found by impl="auto".
    call = replace(call, case=op.case_of(**op.inputs(dtype=DTYPES[call.dtype], device="meta", **call.case)))
    (entry,) = tune([(call, 1)], lock, modes=(mode,), bucket=False).entries.values()
    return result_of(what, op, mode, entry)


def result_of(what: str, op: Op, mode: str, entry: dict) -> dict:
    """What a lock's entry says of PyTorch and Triton, as the benchmarks return it; `what` is the op's name in print."""
    candidates: dict[str, dict] = entry["candidates"]
    stock = {n: c["ms"] for n, c in candidates.items() if n in ("eager", "torch") and "ms" in c}
    kernel = candidates.get(entry["chosen"] if op.ours(entry["chosen"]) else "triton", {"ok": False, "why": "there is none"})
    pytorch, triton = min(stock.values(), default=None), kernel.get("ms")
    if triton is None:
        reason = kernel["why"] or "kernels are only interpreted on this machine, never timed"
    else:
        reason = entry["why"]
    return {
        "op": what, "mode": mode, "pytorch_ms": pytorch, "triton_ms": triton,
        "speedup": pytorch / triton if pytorch and triton else None,
        "use_triton": op.ours(entry["chosen"]), "chosen": entry["chosen"],
        "verified": kernel["ok"], "reason": reason,
        "candidates": {n: {"ms": c.get("ms"), "ok": c["ok"], "why": c["why"]} for n, c in candidates.items()},
    }


def benchmark_rms_norm(
    batch_size: int = 16, seq_len: int = 256, d_model: int = 384,
    dtype: str = "bfloat16", mode: str | None = None, lock: Lock | str | None = None,
) -> dict:
    """Verify and time RMSNorm, forward and backward, at (batch_size * seq_len, d_model).

    Returns pytorch_ms, triton_ms, speedup (None where Triton was not timed), use_triton, chosen, verified, reason, candidates.
    """
    _sizes(batch_size=batch_size, seq_len=seq_len, d_model=d_model)
    return _benchmark("RMSNorm", Call("rms_norm", dict(M=batch_size * seq_len, N=d_model), dtype, True), mode, lock)


def benchmark_rotary(
    batch_size: int = 16, seq_len: int = 256, n_heads: int = 8, d_head: int = 48,
    dtype: str = "bfloat16", mode: str | None = None, lock: Lock | str | None = None,
) -> dict:
    """Verify and time rotary embeddings of q and k, forward and backward. Returns what benchmark_rms_norm returns."""
    _sizes(batch_size=batch_size, seq_len=seq_len, n_heads=n_heads, d_head=d_head)
    if d_head % 2:
        raise ValueError(f"d_head must be even, got {d_head}")
    case = dict(B=batch_size, S=seq_len, Hq=n_heads, Hk=n_heads, D=d_head)
    return _benchmark("Rotary", Call("rope", case, dtype, True), mode, lock)


def auto_select_kernels(config: Any) -> Any:
    """Set config.use_triton_rmsnorm and config.use_triton_rotary by measurement at the config's own sizes; returns config.

    A flag that is already True or False is kept: that is how a choice is forced. With benchmark_kernels=False nothing is
    run, and flags left open become False. Results are logged to Weights & Biases when a run is open.
    """
    wanted = [flag for flag in RULES if getattr(config, flag, None) is None]
    if not getattr(config, "benchmark_kernels", True):
        for flag in wanted:
            setattr(config, flag, False)
        print("Kernel benchmark is off: " + _summary(config))
        return config
    if wanted:
        _check(config, wanted)
        print(f"Benchmarking kernels: batch_size={config.batch_size}, seq_len={config.max_seq_len}, d_model={config.d_model}")
    for flag in wanted:
        common = dict(batch_size=config.batch_size, seq_len=config.max_seq_len, dtype=getattr(config, "dtype", "bfloat16"))
        if flag == "use_triton_rmsnorm":
            result = benchmark_rms_norm(**common, d_model=config.d_model)
        else:
            result = benchmark_rotary(**common, n_heads=config.n_heads, d_head=config.d_model // config.n_heads)
        print("\n".join(lines_of(result)))
        setattr(config, flag, result["use_triton"])
    print("Kernel selection: " + _summary(config))
    _log_to_wandb(config)
    return config


def _check(config: Any, wanted: list[str]) -> None:
    """Every wrong size is reported under the config's own name for it, before anything is measured."""
    _sizes(batch_size=config.batch_size, max_seq_len=config.max_seq_len, d_model=config.d_model)
    if "use_triton_rotary" in wanted:
        _sizes(n_heads=config.n_heads)
        if config.d_model % (2 * config.n_heads):
            raise ValueError(f"d_model must split into n_heads={config.n_heads} heads of even width, got {config.d_model}")


def lines_of(r: dict) -> list[str]:
    """A result as it is printed before training: both times, the speed-up, and what is used."""
    def shown(value: float | None) -> str:
        return "not timed" if value is None else f"{value:.3f} ms"

    taken = shown(r["candidates"][r["chosen"]]["ms"])
    return [
        f"  {r['op']} ({r['mode']}, forward + backward)",
        f"    PyTorch: {shown(r['pytorch_ms'])}",
        f"    Triton:  {shown(r['triton_ms'])}{'' if r['triton_ms'] else ' (' + r['reason'] + ')'}",
        *([f"    Speedup: {r['speedup']:.2f}x"] if r["speedup"] else []),
        f"    Using:   {'Triton' if r['use_triton'] else 'PyTorch (' + r['chosen'] + ')'}, {taken}",
    ]


def _summary(config: Any) -> str:
    return ", ".join(f"{label}={'Triton' if getattr(config, flag) else 'PyTorch'}" for flag, label in RULES.items())


def _log_to_wandb(config: Any) -> None:
    wandb = sys.modules.get("wandb")  # only if the user imported it; never imported here
    if wandb is not None and getattr(wandb, "run", None) is not None:
        for flag in RULES:
            wandb.run.summary[flag] = getattr(config, flag)


def manual_kernel_benchmark() -> dict[str, dict]:
    """Benchmark both ops at a spread of sizes, print the results, and return them by size."""
    where = machine.this_machine()
    print(f"Kernel benchmark on {where.name}, torch {torch.__version__}, triton {where.triton}")
    results = {}
    for batch, seq, width in MANUAL[where.device]:
        results[f"rms_norm {batch}x{seq}x{width}"] = benchmark_rms_norm(batch, seq, width)
        results[f"rotary {batch}x{seq}x8x{width // 8}"] = benchmark_rotary(batch, seq, 8, width // 8)
    for size, result in results.items():
        print("\n".join([size, *lines_of(result)]))
    return results
