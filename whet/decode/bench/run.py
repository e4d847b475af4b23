"""Tokens a second of whet's decoder and of its rivals, verified, then timed in turns, beside the bandwidth floor.

What is timed is a run of greedy tokens after a prompt that fills the cache to the context asked for, the same tokens again in
each round; the host waits for none of them. The L2 cache is not flushed between runs: every step reads all weights, twenty
times what the largest L2 holds, so nothing of the step before is left in it.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from whet import measure
from whet.decode.bench import evidence, prepare, quality, rivals
from whet.decode.bench.agree import CHECKED, Truth
from whet.decode.bench.contender import OURS, Contender, GraphContender
from whet.decode.cache import free_bytes
from whet.decode.load import open_model
from whet.decode.quantize import QUANTS, bytes_per_token, quantize, weights
from whet.decode.runner import RING
from whet.figures import error_line
from whet.models.qwen3 import Qwen3

PREFILL = 2048  # tokens of the prompt whose reading is timed
FIRST = len(evidence.PROMPT.split())  # tokens of the prompt that a fresh process is given
LEAST = 9  # runs of each system, however slow the slowest is
LONG_MS = 50.0  # a quarter of a run that takes longer is run enough: an eager system's token takes that of a hundred others
Progress = Callable[[str, int, int], None]
Keep = Callable[[dict], None]


@dataclass
class Asked:
    """What is to be measured."""

    model: str = "qwen3:0.6b"  # a size for random weights, or a folder or file with weights
    contexts: list[int] = field(default_factory=lambda: [128, 1024, 4096, 16384])
    batches: list[int] = field(default_factory=lambda: [1, 8, 64])
    quants: list[str] = field(default_factory=list)
    rivals: list[str] = field(default_factory=list)
    cross: bool = False  # every context at the first batch and every batch at the first context, instead of all at all
    tokens: int = 32  # a run
    seconds: float = 1.0  # of measuring for each system at each point
    rival_contexts: list[int] = field(default_factory=list)  # those of the contexts that rivals are timed at; none: all
    rival_batches: list[int] = field(default_factory=list)  # the same for batches
    rival_seconds: float = 1200.0  # after which no rival is begun
    start: bool = True  # time fresh processes to their first token
    quality: bool = False
    device: str = "auto"

    def __post_init__(self):
        if unknown := [q for q in self.quants if q not in QUANTS]:
            raise ValueError(f"bench decode: unknown quant {unknown[0]!r}; there are {', '.join(QUANTS)}")
        for name, values in (("context", self.contexts), ("batch", self.batches)):
            if not values or min(values) < 1:
                raise ValueError(f"bench decode: {name} must be whole numbers from 1 on, got {values}")
        for name, few, all_of in self.rival_lists():
            if strange := [n for n in few if n not in all_of]:
                raise ValueError(f"bench decode: rival {name} {strange[0]} must be one of --{name}, got {all_of}")
        if not 1 <= self.tokens <= RING:
            raise ValueError(f"bench decode: tokens must be from 1 to {RING}, got {self.tokens}")

    @property
    def ahead(self) -> int:
        """Tokens that a row may reach after its context."""
        return max(self.tokens, CHECKED)

    @property
    def points(self) -> list[tuple[int, int]]:
        return crossed(self.batches, self.contexts) if self.cross else [(b, c) for b in self.batches for c in self.contexts]

    def rival_lists(self) -> list[tuple[str, list[int], list[int]]]:
        return [("context", self.rival_contexts, self.contexts), ("batch", self.rival_batches, self.batches)]

    @property
    def rival_points(self) -> list[tuple[int, int]]:
        """Every context at the first batch, every batch at the first context: compiling a rival for one takes a minute."""
        if not self.rivals:
            return []
        (_, few, contexts), (_, some, batches) = self.rival_lists()
        return crossed(some or batches, few or contexts)

    def jobs(self, longest: int) -> list[prepare.Job]:
        """What is compiled before: for the points, the prefill, the quality's windows and a fresh process's prompt."""
        contexts = {*self.contexts, PREFILL, *([quality.WINDOW] if self.quality else []), *([FIRST] if self.start else [])}
        fit = sorted(c for c in contexts if c + self.ahead <= longest)
        theirs = prepare.rival_jobs(self.rivals, self.rival_points, self.ahead)
        return [*theirs, *prepare.jobs(list(OURS), self.quants, self.batches, fit, self.ahead)]


def crossed(batches: list[int], contexts: list[int]) -> list[tuple[int, int]]:
    return [(b, c) for b in batches for c in contexts if b == batches[0] or c == contexts[0]]


def existing(name: str) -> Path | None:
    return path if (path := Path(name).expanduser()).exists() else None


def opened(name: str, device: str = "auto", dtype: str = "auto"):
    """The model and its text; a path is a path, any other name a size for random weights."""
    if existing(name):
        return open_model(name, device=device, dtype=dtype)
    return open_model(random_weights=name, device=device, dtype=dtype)


def quantised_copy(model: Qwen3, quant: str) -> Qwen3:
    ops, where = model.ops if model.own_ops else None, dict(device=model.embed.device, dtype=model.embed.dtype)
    made = Qwen3(model.c, model.variant, ops, **where)
    made.load_state_dict(model.state_dict())
    quantize(made.requires_grad_(False), quant)
    return made


def reason_of(e: BaseException) -> str:
    """One line."""
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    return error_line(e).removeprefix("ValueError: ")


def release() -> None:
    """Memory of what is gone, back to the device before the next system asks for it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class Bench:
    """measured is what a record holds; it is kept after every part, so that a run that is stopped loses one part."""

    def __init__(self, asked: Asked, keep: Keep = lambda measured: None, progress: Progress = lambda text, done, total: None):
        self.asked, self.keep, self.progress = asked, keep, progress
        model, text = opened(asked.model, asked.device)
        longest = max(asked.contexts) + asked.ahead
        if longest > model.c.max_positions:
            wanted = f"{max(asked.contexts)} + {asked.ahead} tokens"
            raise ValueError(f"bench decode: context {wanted} must fit {asked.model}'s {model.c.max_positions} positions")
        self.models: dict[str, Qwen3] = {"": model}
        self.gpu, self.text = model.embed.device.type == "cuda", text
        self.roof, self.begun = measure.ceilings(), 0.0
        self.rows: dict[tuple, dict] = {}
        self.took: dict[str, float] = {}
        random = existing(asked.model) is None
        self.measured: dict[str, Any] = {
            "model": asked.model if random else Path(asked.model).name, "weights": "random" if random else "real",
            "dtype": str(model.embed.dtype).removeprefix("torch."), "device": model.embed.device.type,
            "parameters": sum(p.numel() for p in model.parameters()), "layers": model.c.layers,
            "tokens": asked.tokens, "ceilings": {"copy_gbs": self.roof.copy_gbs, "tflops": dict(self.roof.tflops)}, "rows": [],
            "note": "" if self.gpu else "No GPU: these times say nothing about one.",
        }

    def save(self, **part) -> None:
        self.measured |= part | {"rows": list(self.rows.values()), "took_s": self.took}
        self.keep(self.measured)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A part of the run, whose length is kept."""
        begun = measure.now()
        try:
            yield
        finally:
            self.took[name] = round(measure.now() - begun, 1)

    def tokens(self, *shape: int) -> torch.Tensor:
        model = self.models[""]
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randint(model.c.vocab, shape, generator=generator).to(model.embed.device)

    def run(self) -> dict:
        asked = self.asked
        self.save()
        if self.gpu:
            with self.stage("compiling"):
                model = self.models[""]
                wanted = asked.jobs(model.c.max_positions)
                self.save(compiled=self.attempt(lambda: prepare.prepare(model, wanted, self.progress)))
        with self.stage("whet"):
            for quant in asked.quants:
                self.progress(f"quantising to {quant}", 0, len(asked.points))
                self.models[quant] = quantised_copy(self.models[""], quant)
            for i, point in enumerate(asked.points):
                self.progress("batch {}, context {}".format(*point), i, len(asked.points))
                self.point(*point, others={})
        with self.stage("prefill"):
            self.progress("prefill", 0, 1)
            self.save(prefill=self.prefill())
        if asked.rival_points:
            with self.stage("rivals"):
                self.against_rivals()
        if asked.start:
            with self.stage("start"):
                self.progress("start to first token", 0, 1)
                self.save(start=self.attempt(lambda: evidence.starts(self.models[""], existing(asked.model), asked.device)))
        if asked.quality:
            with self.stage("quality"):
                args = asked.model, asked.device, asked.quants, self.progress
                self.save(quality=self.attempt(functools.partial(evidence.measure_quality, *args)))
        self.save()
        return self.measured

    def against_rivals(self) -> None:
        """With the model's own weights alone; what whet's took at the same point before is then taken again, in turns."""
        asked, self.begun = self.asked, measure.now()
        for i, point in enumerate(asked.rival_points):
            self.progress("rivals: batch {}, context {}".format(*point), i, len(asked.rival_points))
            if self.late():
                self.rows |= {(name, "", *point): self.lost(name, "", *point, self.late()) for name in asked.rivals}
            else:
                self.point(*point, others={name: rivals.RIVALS[name] for name in asked.rivals})

    def late(self) -> str:
        """Why no rival is begun any more, or nothing."""
        limit = self.asked.rival_seconds
        return f"not begun: the {limit:.0f} s for rivals were used up" if measure.now() - self.begun > limit else ""

    def point(self, batch: int, context: int, others: dict) -> None:
        """Every system at one batch and context: built, verified, timed in turns. What is timed replaces an earlier row."""
        for quants in [[""]] if others else self.together(batch, context):
            self.in_turns(quants, batch, context, others)
        self.save()

    def together(self, batch: int, context: int) -> list[list[str]]:
        """Weights whose systems are timed in turns: all, or each alone where their caches would not fit side by side."""
        model = self.models[""]
        held = 2 * batch * (context + self.asked.ahead) * (bytes_per_token(model, 1) - bytes_per_token(model, 0))
        fits = len(OURS) * len(self.models) * held < free_bytes(model.embed.device) / 2
        return [list(self.models)] if fits else [[quant] for quant in self.models]

    def in_turns(self, quants: list[str], batch: int, context: int, others: dict) -> None:
        ready: dict[tuple, tuple[dict, Contender]] = {}
        fresh: dict[tuple, dict] = {}
        for quant in quants:
            try:
                model = self.models[quant]
                truth = Truth(model, self.tokens(1, context), self.tokens(batch, CHECKED))
            except Exception as e:
                why = f"nothing to verify against: {reason_of(e)}"
                fresh["whet", quant, batch, context] = self.lost("whet", quant, batch, context, why)
                continue
            for name, kind in (OURS | others).items():
                if kind.refused(self.models[quant], batch):
                    continue
                row, contender = self.built(kind, name, quant, batch, context, truth)
                fresh[name, quant, batch, context] = row
                if contender is not None:
                    ready[name, quant, batch, context] = row, contender
            del truth
            release()
        self.timed(ready)
        for _, contender in ready.values():
            contender.close()
        self.rows |= {key: row for key, row in fresh.items() if row.get("ms") or not self.rows.get(key, {}).get("ms")}
        del ready
        release()

    @staticmethod
    def attempt(part: Callable[[], dict]) -> dict:
        """A part that fails says why, and the others go on."""
        try:
            return part()
        except Exception as e:
            return {"why": reason_of(e)}
        finally:
            release()

    def lost(self, name: str, quant: str, batch: int, context: int, why: str = "") -> dict:
        return {"system": name, "quant": quant, "batch": batch, "context": context, "ok": False, "why": why}

    def built(self, kind, name: str, quant: str, batch: int, context: int, truth: Truth) -> tuple[dict, Contender | None]:
        row, begun = self.lost(name, quant, batch, context), measure.now()
        if name in rivals.RIVALS and (why := self.late()):
            return row | {"why": why}, None
        try:
            with rivals.quiet():
                skipped = rivals.skipped_graphs()
                contender = kind(self.models[quant], batch, context + self.asked.ahead)
                verdict = truth.judge(contender)
        except Exception as e:
            return row | {"why": reason_of(e)}, None
        if self.gpu and rivals.skipped_graphs() > skipped:
            row["note"] = "without a CUDA graph: its compiler gave up on one"
        row |= {"ok": verdict.ok, "why": verdict.why, "share": round(verdict.share, 4)}
        row["ready_s"] = round(measure.now() - begun, 1)
        if not verdict.ok:
            contender.close()
            return row, None
        return row, contender

    def timed(self, ready: dict[tuple, tuple[dict, Contender]]) -> None:
        """In turns; where they fail together, each alone, so that one that fails costs itself only."""
        runs: dict[str, Callable] = {}
        try:
            with rivals.quiet():
                lengths = [self.length_of(c) for _, c in ready.values()]
                for n, (_, c) in zip(lengths, ready.values()):
                    runs[str(len(runs))] = functools.partial(c.run, n)
                found = measure.compare(runs, seconds=self.asked.seconds, flush=False, least=LEAST)
        except Exception as e:
            if len(ready) == 1:
                (row, _), = ready.values()
                row |= {"ok": False, "why": reason_of(e)}
                return
            for key, one in ready.items():
                self.timed({key: one})
            return
        for n, (row, _), timing in zip(lengths, ready.values(), found.values()):
            each = {f: round(getattr(timing, f) / n, 6) for f in ("ms", "low", "high")} | {"samples": timing.samples}
            row |= each | self.figures(row, each["ms"], n) | {"together": len(runs), "tokens": n}
        plain = {row["system"]: row["ms"] for row, _ in ready.values() if not row["quant"]}
        for row, _ in ready.values():
            if row["quant"] and row["system"] in plain:
                row["speedup"] = round(plain[row["system"]] / row["ms"], 3)

    def length_of(self, contender: Contender) -> int:
        """Tokens of a run that is timed."""
        few, watch = max(1, self.asked.tokens // 4), measure.Stopwatch(self.measured["device"])
        contender.run(few)
        with watch("few"):
            contender.run(few)
        return few if watch.ms("few") > LONG_MS else self.asked.tokens

    def bytes_of(self, quant: str, batch: int, context: int, tokens: int) -> int:
        """What a step must read at the middle of a run: the weights once, each row's keys and values."""
        model, middle = self.models[quant], context + tokens // 2
        weights_only = bytes_per_token(model, 0)
        return weights_only + batch * (bytes_per_token(model, middle) - weights_only)

    def figures(self, row: dict, ms: float, tokens: int) -> dict:
        moved = self.bytes_of(row["quant"], row["batch"], row["context"], tokens)
        floor = moved / self.roof.copy_gbs / 1e6
        found = {"tokens_per_s": round(row["batch"] / ms * 1e3, 2), "bytes": moved, "floor_ms": round(floor, 6)}
        return found | ({"tb_s": round(moved / ms / 1e9, 4), "of_floor": round(floor / ms, 4)} if self.gpu else {})

    def prefill(self) -> list[dict]:
        """A prompt of PREFILL tokens read and the first token chosen; Transformers' eager forward of the same beside it."""
        model = self.models[""]
        length = min(PREFILL, model.c.max_positions - CHECKED)
        prompt, first = self.tokens(1, length), self.tokens(1, 1)
        kinds: dict[str, type[Contender]] = {"whet": GraphContender}
        if "transformers" in self.asked.rivals:
            kinds["transformers"] = rivals.RIVALS["transformers"]
        rows, runs = {name: self.lost(name, "", 1, length) for name in kinds}, {}
        for name, kind in kinds.items():
            try:
                contender = kind(model, 1, length + CHECKED)
                contender.feed(prompt, first)
                runs[name] = contender.reading(prompt, first)
            except Exception as e:
                rows[name]["why"] = reason_of(e)
        flops, rate = prefill_flops(model, length), self.roof.tflops.get(self.measured["dtype"])
        for name, timing in self.compared(runs, rows).items():
            tflops = flops / timing.ms / 1e9
            rates = {"tflops": round(tflops, 3)} | ({"of_ceiling": round(tflops / rate, 4)} if rate and self.gpu else {})
            rates |= {"ok": True, "tokens_per_s": round(length / timing.ms * 1e3, 1), "flops": flops}
            rows[name] |= timing.as_dict() | rates
        return list(rows.values())


    def compared(self, runs: dict[str, Callable], rows: dict[str, dict]) -> dict[str, measure.Timing]:
        try:
            return measure.compare(runs, seconds=self.asked.seconds, flush=False)
        except Exception as e:
            for name in runs:
                rows[name]["why"] = reason_of(e)
            return {}


def prefill_flops(model: Qwen3, tokens: int) -> int:
    """Products of every token with the layers' weights, of the last with the head, and causal attention."""
    c = model.c
    products = sum(w.data.numel() for name, w in weights(model) if name != "head") * tokens + c.vocab * c.hidden
    seen = sum(min(i, c.window or i) for i in range(1, tokens + 1))
    return 2 * products + 4 * c.layers * c.heads * c.head_dim * seen


def summaries(rows: list[dict]) -> Iterator[str]:
    """One sentence for each point: the fastest of whet's against the fastest rival."""
    for point in dict.fromkeys((r["batch"], r["context"]) for r in rows):
        here = [r for r in rows if (r["batch"], r["context"]) == point and r.get("ms") and not r["quant"]]
        ours = max((r for r in here if r["system"] in OURS), key=lambda r: r["tokens_per_s"], default=None)
        best = max((r for r in here if r["system"] not in OURS), key=lambda r: r["tokens_per_s"], default=None)
        if ours and best:
            ratio = ours["tokens_per_s"] / best["tokens_per_s"]
            ratio_text = f"{ours['system']} {ratio:.2f}x {best['system']}, the fastest other"
            yield f"batch {point[0]}, context {point[1]}: {ratio_text}"
