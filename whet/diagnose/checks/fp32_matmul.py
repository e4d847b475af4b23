"""float32 products at full precision leave the GPU's tensor cores idle, where TF32 or bfloat16 would use them."""

import torch
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, restored
from whet.figures import figure, percent
from whet.machine import float32_precision
from whet.measure import compare
from whet.ops._products import made_for_halves
from whet.race import tie

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")  # what set_float32_matmul_precision applies to
LEAST = 0.05  # of the step: a change of precision must be worth more than a change of speed alone
IDLE = 0.5  # of the step: a GPU that waits for the host this much gains nothing from faster products
ROUNDS = 15  # at least, of each: a median of fewer is moved by one interruption
KEPT = "Call whet.optimize(model, batch): linear layers then run on tensor cores, as accurate as float32. "
LESS = (
    'Where less will do, call torch.set_float32_matmul_precision("high") before the first step (TF32: what is multiplied '
    "keeps 10 bits of mantissa), or run the forward under torch.autocast in bfloat16; either changes the precision, so it is "
    "left to you"
)
HALF = 0.5  # of the ceiling: a product seldom reaches more, so the ceiling alone would understate its time


def float32_flops(events: list[Event]) -> tuple[int, int]:
    """Flops of products of two float32 matrices, and of all ops."""
    single = sum(e.flops for e in events if e.op in PRODUCTS and all(t.dtype == torch.float32 for t in e.inputs))
    return single, sum(e.flops for e in events)


def worth_trying(flops: int, tflops: float, step_ms: float, idle_share: float) -> bool:
    """Whether these flops can take so much of the step that doing them faster would show."""
    return idle_share <= IDLE and flops / tflops / 1e9 / HALF >= LEAST * step_ms


def worth_reporting(highest_ms: float, high_ms: float) -> bool:
    return highest_ms - high_ms >= LEAST * highest_ms


def at(setting: str, target: Target):
    def step():
        torch.set_float32_matmul_precision(setting)
        return target.step()

    return step


def find(run: Run):
    if float32_precision() != "highest":
        return
    flops, every = float32_flops(run.watched.events)
    if not flops or not worth_trying(flops, run.ceilings.tflops["float32"], run.step_ms, run.profile.idle_share):
        return
    try:
        with restored(run.target):
            steps = {setting: at(setting, run.target) for setting in ("highest", "high")}
            times = compare(steps, seconds=min(0.5, run.seconds), flush=False, least=ROUNDS)
    finally:
        torch.set_float32_matmul_precision("highest")
    now, then = times["highest"], times["high"]
    if tie(now, then) or not worth_reporting(now.ms, then.ms):
        return
    largest = max((e for e in run.watched.events if e.op in PRODUCTS), key=lambda e: e.flops)
    yield Finding(
        "fp32_matmul", f"float32 products, {percent(flops / every)} of the step's flops, run without tensor cores: "
        'torch.get_float32_matmul_precision() is "highest" and there is no autocast',
        [f"the step takes {figure(now.ms)} ms, and {figure(then.ms)} ms with TF32 products, measured in turns",
         f"the largest: {largest.op} in {largest.module or 'the model'}, {' x '.join(str(t) for t in largest.inputs)}"],
        fix=(KEPT if made_for_halves() else "") + LESS,
        cost_ms=now.ms - then.ms, gain_ms=now.ms - then.ms, measured=True, module=largest.module, line=largest.line,
    )


class Fp32Example(nn.Module):
    """Large enough that its products are the step."""

    def __init__(self, autocast: bool):
        super().__init__()
        self.layers, self.autocast = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2))), autocast

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            return self.layers(x).float().square().mean()


def example(autocast: bool) -> Target:
    return target_of("example", (Fp32Example(autocast).cuda(), torch.randn(8192, 4096, device="cuda")))


CHECK = Check(
    "fp32_matmul", "float32 products without tensor cores", find, lambda: example(False), lambda: example(True), gpu=True
)
