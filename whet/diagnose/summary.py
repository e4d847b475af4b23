"""A summary of a profile as plain data: each module's time, roofline and bound, and a sentence that names the slowest part."""

import collections
import math
import re
from dataclasses import dataclass

from torch import nn

from whet.diagnose.run import Run
from whet.diagnose.watch import SYNCS, Event
from whet.figures import percent

IDLE = 0.25  # share of a step that a GPU idles before its launches, not its kernels, are what the step waits for
BETWEEN = 0.5  # share of a CPU's step outside any op, above which no module is its slowest part
PARTS = {"forward_ms": "forward", "backward_ms": "backward", "optimizer_ms": "optimizer"}


def pattern(path: str) -> str:
    """'blocks.3.attn' -> 'blocks.*.attn': layers of one kind are listed as one."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)


def folded(model: nn.Module) -> dict[str, str]:
    """Each module's path with the number of a layer starred where its siblings are of its class: not so in most Sequentials."""
    found = {"": ""}
    for path, _ in model.named_modules():
        above, _, name = path.rpartition(".")
        siblings = {type(m) for m in model.get_submodule(above).children()} if path else set()
        same_class = name.isdecimal() and len(siblings) == 1
        found[path] = ".".join(filter(None, (found.get(above, above), "*" if same_class else name)))
    return found


@dataclass
class ModuleGroup:
    """Modules of one kind: their own work, that of modules inside them not counted."""

    path: str
    count: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    host_ms: float = 0.0
    launches: int = 0
    kept_mib: float = 0.0
    flops: int = 0
    bytes: int = 0
    floor_ms: float = 0.0
    compute_ms: float = 0.0  # of the floor, what the flops alone take
    syncs: int = 0

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    @property
    def of_roofline(self) -> float | None:
        return min(1.0, self.floor_ms / self.ms) if self.ms and self.floor_ms else None

    def bound(self, idle_share: float, gpu: bool) -> str:
        if gpu and self.syncs and idle_share > IDLE:
            return "sync"
        if gpu and idle_share > IDLE and self.host_ms > self.ms:
            return "launch"
        return "compute" if self.compute_ms > 0.5 * self.floor_ms else "memory"


def floor_of(run: Run, e: Event) -> tuple[float, float]:
    """(least ms, of that the flops') for one op; one without flops that the compiler may have fused away has no floor."""
    if e.view or (e.compiled and not e.flops):
        return 0.0, 0.0
    dtype = e.inputs[0].dtype if e.inputs else e.outputs[0].dtype if e.outputs else None
    if dtype is None:
        return 0.0, 0.0
    compute = run.floor_ms(0, e.flops, dtype) if e.flops else 0.0
    return max(run.floor_ms(e.bytes), compute), compute


def groups(run: Run, fold: bool = True) -> list[ModuleGroup]:
    """Every kind of module with its own time and its floor, the longest first."""
    found: dict[str, ModuleGroup] = {}
    names = folded(run.target.model) if fold else {}

    def of(path: str) -> ModuleGroup:
        name = names.get(path, path)
        return found.setdefault(name, ModuleGroup(name))

    for path, row in run.profile.rows.items():
        g = of(path)
        g.count += 1
        g.forward_ms += row.forward_us / 1e3
        g.backward_ms += row.backward_us / 1e3
        g.optimizer_ms += row.optimizer_us / 1e3
        g.host_ms += row.host_us / 1e3
        g.launches += row.launches
    for e in run.watched.events:
        g = of("optimizer" if e.phase == "optimizer" else timed_in(run, e))
        floor, compute = floor_of(run, e)
        g.floor_ms += floor
        g.compute_ms += compute
        g.flops += e.flops
        g.bytes += e.bytes
        g.syncs += e.op in SYNCS
    for path, kept in run.watched.kept.items():
        of(path).kept_mib += kept / 2**20
    return sorted(found.values(), key=lambda g: -g.ms)


def timed_in(run: Run, e: Event) -> str:
    """The module in whose time an op lies: that of one inside a compiled part is the part's."""
    path = e.module
    while e.compiled and path and path not in run.profile.rows:
        path = path.rpartition(".")[0]
    return path


def notes(run: Run) -> list[str]:
    """What could not be done as asked, and how what is compiled was looked at."""
    compiled = sum(e.compiled and not e.view for e in run.watched.events)
    compiled_note = (
        f"{compiled} ops of the step are in torch.compile regions: it is timed and profiled compiled, and watched op by op "
        "with the compiler off; copies, alignment and fusing inside these regions are the compiler's and are not judged"
    )
    return [*run.target.notes, *([compiled_note] if compiled else [])]


def overview(run: Run) -> dict:
    """The run as records hold it: the step, its modules, kernels and memory."""
    p = run.profile
    modules = [
        {
            "path": g.path, "count": g.count, "forward_ms": g.forward_ms, "backward_ms": g.backward_ms,
            "optimizer_ms": g.optimizer_ms, "share": g.ms / p.step.ms, "launches": g.launches, "kept_mib": g.kept_mib,
            "flops": g.flops, "bytes": g.bytes, "floor_ms": g.floor_ms, "of_roofline": g.of_roofline,
            "bound": g.bound(p.idle_share, run.gpu),
        }
        for g in groups(run) if g.ms
    ]
    return {
        "step": p.step.as_dict(), "busy_ms": p.busy_us / 1e3, "idle_ms": p.idle_us / 1e3, "launches": p.launches,
        "syncs": p.syncs, "device": p.device, "loss": finite(run.watched.loss), "modules": modules,
        "kernels": [{"name": name, "ms": us / 1e3, "count": count} for name, us, count in p.top(12)],
        "ceilings": {"copy_gbs": run.ceilings.copy_gbs, "tflops": dict(run.ceilings.tflops)},
    }


def finite(x: float | None) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return x if x is not None and math.isfinite(x) else None


def where(path: str, count: int) -> str:
    named = f"module {path}" if path.isdecimal() else path or "the model's own code, outside its modules"
    return f"{named} ({count} of them)" if count > 1 else named


def slowest_part(run: Run) -> str:
    """What is the slowest part, and why, in one sentence."""
    p, worst = run.profile, groups(run)[0]
    step = f"{p.step.ms:.{0 if p.step.ms >= 100 else 1 if p.step.ms >= 10 else 2}f} ms step"
    share = worst.ms / p.step.ms
    part = max(PARTS, key=lambda k: getattr(worst, k))
    worst_part = f"{where(worst.path, worst.count)}, {percent(share)} of the {step}, most of it in the {PARTS[part]}"
    if run.gpu and p.idle_share > IDLE and not getattr(run.target.script, "replays", 0):
        median = sorted(k.us for k in p.kernels)[p.launches // 2] if p.kernels else 0.0
        why = "waits for the GPU" if p.syncs > 2 else "launches them one by one"
        return (
            f"The slowest part is the host: the GPU is idle for {percent(p.idle_share)} of the {step} while the host {why} "
            f"({p.launches} kernels, {median:.1f} us each at the median); of the GPU's own work the most is in {worst_part}."
        )
    if not run.gpu and p.idle_share > BETWEEN:
        between = f"between ops, in Python or waiting for a core, where {percent(p.idle_share)} of the {step} passes"
        return f"The slowest part is what lies {between}; of the ops the most is in {worst_part}."
    bound = worst.bound(p.idle_share, run.gpu)
    of = "" if worst.of_roofline is None or not run.gpu else f", at {percent(worst.of_roofline)} of its roofline"
    return f"The slowest part is {worst_part}: it is bound by {bound}{of}."


def per_layer(run: Run) -> list[dict]:
    """For a decoder: the work inside one layer by what it does, over all layers; ms, share, launches."""
    kinds: dict[str, list] = collections.defaultdict(lambda: [0.0, 0])
    for k in run.profile.kernels:
        label = role(k.module, k.op)
        kinds[label][0] += k.us / 1e3
        kinds[label][1] += 1
    total = sum(ms for ms, _ in kinds.values()) or 1.0
    rows = [{"part": part, "ms": ms, "share": ms / total, "launches": n} for part, (ms, n) in kinds.items()]
    return sorted(rows, key=lambda r: ROLES.index(r["part"]))


ROLES = (
    "norm", "qkv", "qk norm", "rope", "attention", "output projection", "residual", "gate and up", "activation", "down", "head",
    "embedding", "cache", "other",
)
NAMED = (  # (in the module's path, in the op): the first that fits
    ("qk norm", r"(q_norm|k_norm)$", ""), ("norm", r"norm|ln_\d|ln_f", ""), ("qkv", r"(q_proj|k_proj|v_proj|qkv|c_attn)$", ""),
    ("output projection", r"(o_proj|out_proj|attn\.c_proj|\.o)$", ""),
    ("gate and up", r"(gate_proj|up_proj|gate_up|c_fc)$", ""), ("down", r"(down_proj|\.down|mlp\.c_proj)$", ""),
    ("activation", r"(act|act_fn|mlp|swiglu)[^.]*$", ""),
    ("head", r"(lm_head|head)$", ""), ("embedding", r"(embed|wte|wpe|embed_tokens)$", ""), ("rope", r"rotary|\.rope$", ""),
    ("cache", r"attn|attention", r"cat|copy_|index_copy|slice_scatter"),
    ("attention", r"attn|attention", r"scaled_dot_product|softmax|bmm|flash|attention"),
    ("rope", r"attn|attention", r"mul|neg|sin|cos|add|cat"), ("residual", r"(layers|blocks|h)\.\d+$", r"add"),
    ("cache", r"layers\.\d+$", r"index_put|arange"), ("attention", r"layers\.\d+$", r"bmm|softmax|masked|mul|div|le$|not|copy"),
)


def role(module: str, op: str) -> str:
    """Which part of a decoder layer a kernel belongs to, by the module it ran in and the op that launched it."""
    for label, path, name in NAMED:
        if re.search(path, module) and (not name or re.search(name, op)):
            return label
    return "other"
