"""Which kernels a decoder may use: those verified for this model's shape, on this GPU, with these versions and sources.

The first time a shape is met a child process verifies it (whet/decode/proof.py), in seconds; the verdict is kept in whet.lock.
Where it fails, and on a CPU, decoding goes on by what was measured and by stock calls: slower, and one line says why.
"""

import collections
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from whet import machine, measure
from whet.decode import persistent, proof
from whet.decode.cache import free_bytes
from whet.lock import Lock, lock_path, say
from whet.models.qwen3 import Qwen3, Qwen3Config, kernels
from whet.op import DTYPE_NAMES, discover
from whet.ops._weights import quant_of
from whet.tune import save_decoder
from whet.worker import Lost, Worker

LIMIT_S = 120.0  # a part that takes longer to compile and run is given up
CHILDREN = 6  # side by side at most: most of the time goes into compiling, which is the host's work
CHILD = str(Path(__file__).with_name("child.py"))
PASSING = "out of memory"  # a reason that need not hold the next time: such a verdict is not kept
USED = (  # the ops of a model that decodes: of a step, then of a prompt
    "norm_linear", "cached_attention", "linear_add", "norm_swiglu", "norm_argmax", "norm_rope", "rms_norm", "add_rms_norm",
    "swiglu", "attention", "rope",
)
RUN = (  # what runs them, and what verifies them
    "models/qwen3", "decode/runner", "decode/chunks", "decode/note", "decode/persistent", "decode/nvrtc", "decode/proof",
    "decode/hostile", "decode/decoded", "decode/oracle", "decode/bias", "verify", "judge",
)
INSTEAD = {"graph": "decoding by stock calls, slower", "persistent": "one sequence is decoded without the persistent kernel"}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Trust:
    """What may run. why: one line for each thing that may not."""

    kernels: bool
    persistent: bool
    why: tuple[str, ...] = ()


@cache
def sources() -> str:
    return hash_of(Path(__file__).resolve().parent.parent)


def hash_of(root: Path) -> str:
    """Of all that is verified, in whet's folder, and of what verifies it: after an edit everything is verified again."""
    unused = {name for name in discover() if name not in USED}
    ops = [p for p in (root / "ops").rglob("*.py") if p.relative_to(root / "ops").parts[0].removesuffix(".py") not in unused]
    others = [root / f"{name}.py" for name in RUN]
    files = sorted({*ops, *others, *(root / "decode" / "cuda").glob("*.cu")})
    return hashlib.sha256(b"\0".join(f.name.encode() + b"\0" + f.read_bytes() for f in files)).hexdigest()[:16]


def format_of(model: Qwen3) -> str:
    """The proof's name for how the weights are stored."""
    plain = {dtype: name for name, (dtype, quant) in proof.FORMATS.items() if quant is None}
    return quant_of(model.head.data) or plain[model.embed.dtype]


def key_of(c: Qwen3Config, fmt: str, dtype: str, path: str, rows: int, drafts: bool) -> str:
    """What a verdict holds for; the GPU and the versions are the lock's own key."""
    kinds = {"qk_norm": c.qk_norm, "qkv_bias": c.qkv_bias, "o_bias": c.o_bias, "tied": c.tied}
    sizes = f"hidden={c.hidden} heads={c.heads}/{c.kv_heads}x{c.head_dim} ffn={c.ffn} vocab={c.vocab} layers={min(c.layers, 2)}"
    more = [*(k for k, on in kinds.items() if on), f"eps={c.eps:g}", f"window={c.window}", f"positions={c.max_positions}"]
    return f"{path} rows={rows}{' drafts' if drafts else ''} {fmt} {dtype} {sizes} {' '.join(more)} sources={sources()}"


class Verifier:
    """Children that verify one shape. start() is worth calling before the weights are loaded: it does not wait."""

    def __init__(self):
        self.workers = [self.worker()]

    @staticmethod
    def worker() -> Worker:
        return Worker(interpret=machine.triton_mode() == "interpret", preload=CHILD)

    def start(self) -> None:
        self.workers[0].start()

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def verdicts(
        self, c: Qwen3Config, fmt: str, asked: dict[str, list[proof.ProofPart]], device, progress: Progress,
    ) -> dict[str, dict]:
        """Of each path, by its parts: ok, why, the largest share of a budget, and the seconds that all took."""
        begun = measure.now()
        queue = collections.deque((path, part) for path in reversed(asked) for part in asked[path])  # NVRTC takes longest
        total, found = len(queue), {path: list[dict]() for path in asked}
        self.workers += [self.worker() for _ in range(min(total, side_by_side(c, device)) - 1)]
        given = (c, fmt, queue, str(device), found)
        threads = [threading.Thread(target=self._some, args=(w, *given), daemon=True) for w in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                progress("verifying the decode kernels, once", sum(map(len, found.values())), total)
                thread.join(0.1)  # short, so that Ctrl-C is handled
        took = {"s": round(measure.now() - begun, 1)}
        return {path: verdict_of(answers) | took for path, answers in found.items()}

    @staticmethod
    def _some(
        worker: Worker, c: Qwen3Config, fmt: str, queue: collections.deque, device: str, found: dict[str, list[dict]],
    ) -> None:
        """Parts one after another, until none is left; those of a path that failed are passed over."""
        while queue:
            try:
                path, part = queue.popleft()
            except IndexError:  # another took the last
                return
            if not all(f["ok"] for f in found[path]):
                continue
            try:
                answer = worker.ask(LIMIT_S, **proof.request(c, fmt, part, device))
            except Lost as e:
                answer = {"error": str(e)}
            if "ok" not in answer:
                answer = {"ok": False, "share": 0.0, "why": f"{part.name}: {answer['error']}"}
            found[path].append(answer)


def verdict_of(answers: list[dict]) -> dict:
    bad = next((a for a in answers if not a["ok"]), None)
    share = max((a["share"] for a in answers), default=0.0)
    return {"ok": bad is None, "why": bad["why"] if bad else "", "share": share, "parts": len(answers)}


def side_by_side(c: Qwen3Config, device: torch.device) -> int:
    """As many children as have cores and memory: each holds two layers and the vocabulary, and both again in float32."""
    if device.type != "cuda":
        return 1
    layer = c.hidden * (sum(c.qkv_rows) + c.heads * c.head_dim + 3 * c.ffn)
    needed = 10 * (2 * layer + (1 if c.tied else 2) * c.vocab * c.hidden) + (2 << 30)
    return max(1, min(CHILDREN, (os.cpu_count() or 1) // 2, free_bytes(device) // needed))


def wanted(model: Qwen3) -> bool:
    """Whether whet's kernels are to decode this model, if they are right: on a GPU, unless its ops were given by name."""
    return model.embed.device.type == "cuda" and model.variant == "tuned" and not model.own_ops


def nothing_verified_yet() -> bool:
    """Whether nothing was ever verified here with these sources: then a child can be started before a model is opened."""
    return not any(key.endswith(f"sources={sources()}") for key in Lock.read().decoders)


def trusted(
    model: Qwen3, path: str = "auto", rows: int = 1, drafts: bool = False, verify: bool = True,
    progress: Progress = lambda text, done, total: None, verifier: Verifier | None = None,
) -> Trust:
    """What may decode this model, from the lock, or verified now and kept there; and the model's ops are set to that.

    path     as the runner's; the persistent kernel is verified only where it would be used
    rows     sequences decoded at once at most
    verify   False: the kernels are used as they are
    """
    asked = {"graph": rows} if wanted(model) else {}
    asked |= {"persistent": 1} if persistent.wanted(model, path) else {}
    if not asked:
        return Trust(False, False)
    found = verdicts(model, asked, drafts, progress, verifier) if verify else {p: {"ok": True, "why": ""} for p in asked}
    failures = {p: v["why"] for p, v in found.items() if not v["ok"]}
    why = tuple(f"{INSTEAD[p]}: the {p} kernels were not found right on this GPU: {reason}" for p, reason in failures.items())
    for line in why:
        say(line)
    graph, one = (p in asked and p not in failures for p in ("graph", "persistent"))
    if graph:
        model.ops = kernels()
    return Trust(graph, one, why)


def verdicts(model: Qwen3, asked: dict[str, int], drafts: bool, progress: Progress, verifier: Verifier | None) -> dict:
    """The verdict of each path: kept, or made now. asked: rows by path."""
    c, fmt, dtype = model.c, format_of(model), model.embed.dtype
    of_graph = {p: drafts and p == "graph" for p in asked}
    keys = {p: key_of(c, fmt, DTYPE_NAMES[dtype], p, n, of_graph[p]) for p, n in asked.items()}
    kept = Lock.read().decoders
    found: dict[str, dict] = {p: kept[key] for p, key in keys.items() if key in kept}
    missing = {p: proof.parts(c, fmt, p, n, of_graph[p], dtype) for p, n in asked.items() if p not in found}
    if not missing:
        return found
    say("verifying the decode kernels for this model on this GPU, once")
    hands = verifier or Verifier()
    try:
        made = hands.verdicts(c, fmt, missing, model.embed.device, progress)
    finally:
        hands.close()
    for p, verdict in made.items():
        if PASSING not in verdict["why"]:
            save_decoder(Lock.read(), keys[p], verdict)
    if all(v["ok"] for v in made.values()):
        say(f"verified in {max(v['s'] for v in made.values()):.1f} s; kept in {lock_path()}")
    return found | made
