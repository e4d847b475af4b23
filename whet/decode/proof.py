"""Are the decode kernels right on this machine, for a model of this shape? A few layers of its width, proved part by part.

    verify_shape(config, path="graph", fmt="int8", device="cuda", rows=8)      -> Verdict: ok, or which part failed and how

step      every op of a decode step, at the contexts and batch sizes that choose other kernels, each op verified alone
head      the likeliest token, wherever in the vocabulary it stands; the first of equals; NaN is seen
prefill   every op of a chunk of a prompt, at its beginning and after other chunks
decode    the runner itself, as it serves: tokens, logits, and the keys and values it wrote, from several bursts, again with the
          same bits; the persistent kernel with all its logits

Ops are proved in the model's dtype and, where that is narrower, in float32 too, where a small fault shows. The persistent
kernel has no other dtype: whether its error is biased towards a fault is tested instead (whet/decode/bias.py). The rule is
that of whet.verify.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from whet.choices import public
from whet.decode import hostile
from whet.decode.decoded import decode_verdict
from whet.decode.hostile import FAMILIES, caches, few_layers, model_of_family
from whet.models.qwen3 import Qwen3, Qwen3Config
from whet.op import DTYPE_NAMES, DTYPES, Call, Op, discover
from whet.ops._gemv import batch_invariant
from whet.ops._pdl import pdl
from whet.ops._rows import power_of_two
from whet.ops._weights import dense
from whet.ops.cached_attention import MOST, SPAN
from whet.ops.rms_norm import reference as rms_norm
from whet.verify import VALUE_FACTOR, Verdict, judge, verify

FORMATS: dict[str, tuple[torch.dtype, str | None]] = {  # of weights: the dtype of all else, and how they are quantised
    "bf16": (torch.bfloat16, None), "fp16": (torch.float16, None), "fp32": (torch.float32, None),
    "int8": (torch.bfloat16, "int8"), "int4": (torch.bfloat16, "int4"), "fp8": (torch.bfloat16, "fp8"),
}
PATHS = ("graph", "persistent")
CONTEXTS = (256, 1024, 16384)  # one bucket of few splits, one of more, one whose loop over keys is pipelined
PREFIXES = (0, 200, 2048)  # tokens in the cache before a chunk: none, a ragged number, a whole chunk
CHUNKS = (33, 256)  # tokens of a chunk
LUCK = 4.0  # of the budget in float32: eager's own error over one row of one draw is a matter of luck (an H200: 1.1 to 1.4)
VOCAB_BLOCK = 2**13  # rows of the head widened at once


class Rejected(Exception):
    """A kernel was found wrong; the message says which and how."""


@dataclass(frozen=True)
class ProofPart:
    """One piece of the proof: what one request to a child process proves, under one set of compiled kernels."""

    kind: str
    dtype: str
    rows: int = 1
    context: int = 256
    tokens: int = 1  # new tokens of a row in a step
    families: tuple[str, ...] = FAMILIES

    @property
    def name(self) -> str:
        sizes = {"head": f"{self.rows} rows", "prefill": f"up to {self.context} tokens before it"}
        several = f" of {self.tokens} tokens" if self.kind == "step" and self.tokens > 1 else ""
        default = f"{self.rows} {'rows' if self.rows > 1 else 'row'}{several}, context {self.context}"
        return f"{self.kind}, {sizes.get(self.kind, default)}, {self.dtype}"


def buckets(rows: int) -> list[int]:
    """The batch sizes that a runner of so many rows decodes at."""
    return sorted({min(power_of_two(n), rows) for n in range(1, rows + 1)})


def parts(
    c: Qwen3Config, fmt: str, path: str, rows: int = 1, drafts: bool = False, dtype: torch.dtype | None = None,
) -> list[ProofPart]:
    """What is to be proved, the longest to compile first. drafts: steps of several tokens too, as speculation takes them."""
    check(fmt, path, rows)
    own = DTYPE_NAMES[dtype or FORMATS[fmt][0]]
    contexts = sorted({min(n, c.max_positions) for n in CONTEXTS})
    if path == "persistent":
        return [ProofPart("persistent", own, context=contexts[-1])]  # one: it is compiled once
    found: list[ProofPart] = []
    for name in dict.fromkeys((own, "float32")):
        short = contexts[:2] if name == own else contexts[:1]
        found += [ProofPart("step", name, rows=1, context=n) for n in (contexts if name == own else short)]
        found += [ProofPart("step", name, rows=B, context=n) for B in buckets(rows)[1:] for n in short]
        found += [ProofPart("step", name, context=short[-1], tokens=MOST)] if drafts else []
        found += [ProofPart("head", name, rows=B) for B in buckets(rows)]
        prefix = max(n for n in PREFIXES if n == 0 or n + max(CHUNKS) <= c.max_positions)
        found.append(ProofPart("prefill", name, context=prefix))
    return found + [ProofPart("decode", own, rows=B, context=contexts[:2][-1]) for B in buckets(rows)]


def check(fmt: str, path: str, rows: int) -> None:
    if fmt not in FORMATS:
        raise ValueError(f"verify_shape: fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    if path not in PATHS:
        raise ValueError(f"verify_shape: path must be one of {', '.join(PATHS)}, got {path!r}")
    if not 1 <= rows <= 64:
        raise ValueError(f"verify_shape: rows must be from 1 to 64, got {rows}")


def verify_shape(
    config: Qwen3Config, path: str = "graph", fmt: str | None = None, device: str = "cuda", *, rows: int = 8,
    drafts: bool = False,
    dtype: torch.dtype | None = None, only: Callable[[ProofPart], bool] = lambda part: True,
) -> Verdict:
    """The whole proof in this process. The first part that fails ends it; why names the part, the op and the error.

    fmt    one of FORMATS; None: weights that are not quantised, in bfloat16
    dtype  of all but quantised weights, where it is not the format's own
    only   which parts to prove
    """
    fmt, tightest = fmt or "bf16", Verdict(True, 0.0)
    for part in parts(config, fmt, path, rows, drafts, dtype):
        if only(part):
            verdict = prove(config, fmt, part, device)
            if not verdict.ok:
                return verdict
            tightest = max(tightest, verdict, key=lambda v: v.share)
    return tightest


def prove(config: Qwen3Config, fmt: str, part: ProofPart, device: str) -> Verdict:
    """One part. What a kernel raises goes to the caller."""
    kinds = {"step": step_verdict, "head": head_verdict, "prefill": prefill_verdict, "decode": runner_verdict,
             "persistent": runner_verdict}
    tightest = Verdict(True, 0.0)
    for family in part.families:
        try:
            with torch.no_grad():
                verdict = kinds[part.kind](config, FORMATS[fmt][1], part, device, family)
        except Rejected as e:
            verdict = Verdict(False, why=str(e))
        if not verdict.ok:
            return Verdict(False, verdict.error, verdict.budget, f"{part.name}, {family} weights: {verdict.why}")
        tightest = max(tightest, verdict, key=lambda v: v.share)
    return tightest


class ProvingChoices:
    """In the place of Choices: every call of an op is verified on its very arguments, and the formula's result goes on.

    So a fault is seen where it is, and not in what later ops made of it.
    """

    def __init__(self, average: bool):
        """average: whether values are ordinary ones, whose rounding errors average out."""
        self.average, self.tightest = average, Verdict(True, 0.0)
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Callable:
        if name not in discover():
            raise AttributeError(name)
        return functools.partial(self.call, discover()[name])

    def call(self, op: Op, *args, **options):
        bound = op.bind(args, options)
        if op.why_not("triton", bound) is None:
            slack = LUCK if next(iter(bound.values())).dtype == torch.float32 else 1.0
            verdict = verify(op, op.candidate("triton"), bound, grad=False, average=self.average, slack=slack)
            if not verdict.ok:
                raise Rejected(f"{op.name}: {verdict.why}")
            self.tightest = max(self.tightest, verdict, key=lambda v: v.share)
            self.seen.add(op.name)
        return op.run("eager")(**bound)


@contextlib.contextmanager
def proving(model: Qwen3, family: str) -> Iterator[ProvingChoices]:
    before, found = model.ops, ProvingChoices(family == "plain")
    model.ops = found  # type: ignore[assignment]
    try:
        yield found
    finally:
        model.ops = before


def some_tokens(model: Qwen3, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(model.c.vocab, shape, generator=generator).to(model.embed.device)


def positions(rows: int, last: int) -> list[list[int]]:
    """Where the rows of a step stand: the first and last places, both sides of a span's end, between spans. Rows are ragged."""
    places = [last, 0, SPAN - 1, SPAN, SPAN + 1, 1, last // 2 + 1, 2 * SPAN - 1, 3 * SPAN // 2]
    inside = list(dict.fromkeys(p for p in places if 0 <= p <= last))
    if rows == 1:
        return [[p] for p in inside[:6]]
    return [[inside[b % len(inside)] for b in range(rows)]]


def step_verdict(c: Qwen3Config, quant: str | None, part: ProofPart, device: str, family: str) -> Verdict:
    """Each op of a step, on what the formulas of the ops before give it."""
    model = model_of_family(few_layers(c, 1), family, DTYPES[part.dtype], device, quant)
    with proving(model, family) as found, pdl(), batch_invariant() if part.tokens > 1 else contextlib.nullcontext():
        for olds in positions(part.rows, part.context - part.tokens):
            kv = caches(model, olds, part.context, family)
            at = torch.tensor(olds, device=model.embed.device)
            model.step(some_tokens(model, part.rows, part.tokens), kv[0], kv[1], at, context=part.context)
    return found.tightest


def prefill_verdict(c: Qwen3Config, quant: str | None, part: ProofPart, device: str, family: str) -> Verdict:
    """Each op of a chunk of a prompt after up to part.context tokens, in the second row of a cache."""
    model = model_of_family(few_layers(c, 2), family, DTYPES[part.dtype], device, quant)
    cases = [(0, T) for T in CHUNKS] + [(start, CHUNKS[0]) for start in PREFIXES if 0 < start <= part.context]
    with proving(model, family) as found:
        for start, T in cases:
            T = min(T, c.max_positions - start)
            kv = [t[:, 1:] for t in caches(model, [1, start], start + T + 3, family)]
            at = torch.tensor([start], device=model.embed.device)
            model.logits(model.extend(some_tokens(model, 1, T), kv[0], kv[1], at, start=start)[:, -1])
    return found.tightest


def head_verdict(c: Qwen3Config, quant: str | None, part: ProofPart, device: str, family: str) -> Verdict:
    """norm_argmax of hidden states that point each at a token: at both ends of the vocabulary, at the ends of blocks."""
    model = model_of_family(few_layers(c, 1), family, DTYPES[part.dtype], device, quant)
    V, w = c.vocab, model.head
    twins = sorted({V // 3, V - 3} & set(range(V)))  # two equal rows: the first counts
    for t in (w.data, w.scale):
        if t is not None:
            t[twins[-1]] = t[twins[0]]
    places = [p for p in (V - 1, 0, 15, 16, 1023, 1024, V // 2, V - 2, 31, V // 2 + 1) if 0 <= p < V and p not in twins]
    places += [twins[0]] + [0] * (-(len(places) + 1) % part.rows)
    x = pointing(model, places, family)
    wanted, eager = (logits_of(model, x, dtype) for dtype in (torch.float64, x.dtype))
    with pdl():
        run = functools.partial(public(discover()["norm_argmax"]), impl="triton")
        pieces = [run(piece, model.norm, w.data, w.scale, c.eps) for piece in x.split(part.rows)]
        x[-1] = float("nan")
        broken = run(x[-part.rows :], model.norm, w.data, w.scale, c.eps)[1]
    token, value = (torch.cat(t) for t in zip(*pieces))
    step = torch.finfo(x.dtype).eps
    if reason := chosen_badly(token, wanted, eager, step):
        return Verdict(False, why=f"norm_argmax: {reason}")
    first = places.index(twins[0])
    if len(twins) > 1 and token[first].item() == twins[1]:
        return Verdict(False, why=f"norm_argmax: of equal logits the first counts, got token {twins[1]} and not {twins[0]}")
    if torch.isfinite(broken[-1]):
        return Verdict(False, why="norm_argmax: a hidden state that is not a number gives a finite logit")
    at = wanted.gather(1, token[:, None]).squeeze(1)
    logits = {"logit": value}, {"logit": eager.gather(1, token[:, None]).squeeze(1).float()}, {"logit": at}
    verdict = judge(*logits, step)
    return verdict if verdict.ok else Verdict(False, verdict.error, verdict.budget, f"norm_argmax: {verdict.why}")


def pointing(model: Qwen3, places: Sequence[int], family: str) -> torch.Tensor:
    """Hidden states whose norm lies along the head's rows at these places, with some noise."""
    w = model.head
    each = [(w.data[p : p + 1], None if w.scale is None else w.scale[p : p + 1]) for p in places]
    rows = torch.cat([dense(data, scale, torch.float32) for data, scale in each])
    norm = model.norm.float()
    safe = torch.where(norm.abs() < 0.1, torch.inf, norm)
    generator = torch.Generator(rows.device).manual_seed(5)
    noise = torch.randn(rows.shape, generator=generator, device=rows.device)
    along = torch.nn.functional.normalize(rows, dim=1) * rows.shape[1] ** 0.5 / safe + 0.2 * noise
    return (along * hostile.size_of(family, model.c)).to(model.embed.dtype)


def logits_of(model: Qwen3, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By the formula of norm_argmax's reference, the head widened block by block."""
    wide, w = torch.promote_types(dtype, torch.float32), model.head
    y = rms_norm(x.to(dtype), model.norm, model.c.eps)
    blocks = [slice(i, i + VOCAB_BLOCK) for i in range(0, w.data.shape[0], VOCAB_BLOCK)]
    stored = ((w.data[b], None if w.scale is None else w.scale[b].to(wide)) for b in blocks)
    return torch.cat([torch.nn.functional.linear(y, dense(data, scale, dtype)) for data, scale in stored], 1).double()


def chosen_badly(token: torch.Tensor, wanted: torch.Tensor, eager: torch.Tensor, step: float) -> str | None:
    """None, or by how much a chosen token is not the likeliest: two logits within their budgets may change places."""
    if token.min() < 0 or token.max() >= wanted.shape[-1]:
        return f"a chosen token must be from 0 to {wanted.shape[-1] - 1}, got {token.min().item()} to {token.max().item()}"
    worst = (eager - wanted).abs().amax(-1) + step * wanted.abs().amax(-1)
    gap = wanted.amax(-1) - wanted.gather(-1, token[..., None]).squeeze(-1)
    if not (gap > 2 * VALUE_FACTOR * worst).any():
        return None
    at = (gap - 2 * VALUE_FACTOR * worst).argmax()
    return f"token {token.flatten()[at].item()} was chosen, whose logit is {gap.flatten()[at].item():.2e} below the likeliest's"


def runner_verdict(c: Qwen3Config, quant: str | None, part: ProofPart, device: str, family: str) -> Verdict:
    model = model_of_family(few_layers(c), family, DTYPES[part.dtype], device, quant)
    return decode_verdict(model, part.kind, part.rows, part.context, family, chosen_badly)


def answer(call: Call, config: dict, fmt: str, part: dict, device: str) -> dict:
    """What the child process says of a part (whet/decode/child.py)."""
    made = Qwen3Config(**config | {"eos": tuple(config["eos"])})
    verdict = prove(made, fmt, ProofPart(**part | {"families": tuple(part["families"])}), device)
    return {"ok": verdict.ok, "share": round(verdict.share, 4), "why": verdict.why}


def request(config: Qwen3Config, fmt: str, part: ProofPart, device: str) -> dict[str, Any]:
    """The question to the child process, as JSON holds it."""
    fields = asdict(config) | {"rope_scaling": dict(config.rope_scaling) if config.rope_scaling else None}
    call = asdict(Call("decoder", {"part": part.name}, part.dtype, False))
    return dict(what="verify_decoder", call=call, config=fields, fmt=fmt, part=asdict(part), device=device)
