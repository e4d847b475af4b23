"""How near a model's predictions are to those of itself in float32: on text, token by token, each predicted from the true ones.

    wide = float32_reference(model)
    found = score({"ours": cached(model), "theirs": lambda tokens: hf(tokens).logits}, plain(wide), tokens)
    not_worse(found["ours"], found["theirs"])

A candidate is any function from tokens (B, T) to logits (B, T, V): the plain forward, the cached path that decodes, another
library's model. All are given the same windows of the text, so their results are compared token by token.
"""

import ast
import math
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from whet.decode.cache import BLOCK as CACHE_BLOCK
from whet.decode.oracle import full_float32, widened
from whet.decode.quantize import QUANTS, quantize, weights
from whet.ops._pdl import pdl
from whet.ops._weights import quant_of

Logits = Callable[[torch.Tensor], torch.Tensor]
WINDOW = 512
ROW_BLOCK = 2**24  # logits compared at once: a copy in float64 is 128 MB
LEVEL = 0.001  # how often a candidate that is as good would be called worse
# Modules of the standard library with the most to say: 440,000 characters in Python 3.10, 465,000 in 3.13.
PROSE = (
    "argparse", "codecs", "collections", "configparser", "difflib", "doctest", "email/message", "http/cookiejar", "inspect",
    "ipaddress", "json", "logging", "mailbox", "optparse", "shutil", "smtplib", "statistics", "subprocess", "tarfile",
    "threading", "turtle", "typing", "unittest/case", "unittest/mock", "urllib/request",
)


def text_sample(n_chars: int) -> str:
    """The first n_chars of what the standard library's docstrings say: real text that is on every machine.

    The same on every run of one Python version; versions differ by what was edited between them.
    """
    if n_chars < 1:
        raise ValueError(f"text_sample: n_chars must be at least 1, got {n_chars}")
    passages, length = [], 0
    for path in prose():
        for passage in docstrings(path):
            passages.append(passage)
            length += len(passage) + 2
            if length >= n_chars + 2:
                return "\n\n".join(passages)[:n_chars]
    raise ValueError(f"text_sample: n_chars must be at most {max(0, length - 2)}, which is all there is, got {n_chars}")


def prose() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    candidates = (path for name in PROSE for path in (root / f"{name}.py", root / name / "__init__.py"))
    return sorted(path for path in candidates if path.is_file())


@cache
def docstrings(path: Path) -> tuple[str, ...]:
    """Of a module, its classes and functions, as they stand in the file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    documented = (n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    texts = (ast.get_docstring(n) for n in sorted(documented, key=lambda n: getattr(n, "lineno", 0)))
    return tuple(text for text in texts if text)


def plain(model: Any) -> Logits:
    """The model's forward: no cache, no decode kernels."""
    return lambda tokens: model(tokens)


def cached(model: Any, chunk: int = 1, fused: bool = True) -> Logits:
    """The path that decodes: `chunk` tokens at a time over a cache, by the fused ops (model.step) or plainly (model.extend)."""
    if chunk < 1:
        raise ValueError(f"cached: chunk must be at least 1 token, got {chunk}")

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        (B, T), c, embed = tokens.shape, model.c, model.embed
        shape = (c.layers, B, c.kv_heads, -(-T // CACHE_BLOCK) * CACHE_BLOCK, c.head_dim)
        k, v = (torch.zeros(shape, dtype=embed.dtype, device=embed.device) for _ in range(2))
        out = torch.empty(B, T, c.vocab, dtype=torch.float32, device=embed.device)
        for at in range(0, T, chunk):
            positions = torch.full((B,), at, dtype=torch.int64, device=embed.device)
            given = (tokens[:, at : at + chunk], k, v, positions)
            with pdl():
                hidden = model.step(*given, context=k.shape[3]) if fused else model.extend(*given)
            out[:, at : at + chunk] = model.logits(hidden)
        return out

    return logits


def float32_reference(model: Any) -> Any:
    """The same weights widened to float32, every op by its plain formula."""
    for name, w in weights(model):
        if quant := quant_of(w.data):
            raise ValueError(f"float32_reference: {name} is {quant}, expected weights that are not quantised; build it before")
    return widened(model, torch.float32)


@dataclass(frozen=True)
class Scores:
    """One number for each predicted token, in the order of the text; float64 on the CPU."""

    name: str
    tokens: torch.Tensor  # what came
    nll: torch.Tensor  # -log of the probability that the candidate gave the token that came
    reference_nll: torch.Tensor
    kl: torch.Tensor  # KL(reference || candidate)
    error: torch.Tensor  # the largest |logit - reference logit|
    margin: torch.Tensor  # the reference's largest logit less its second
    agrees: torch.Tensor  # whether both have the same largest logit

    @property
    def moved(self) -> torch.Tensor:
        """How far the NLL is from the reference's."""
        return (self.nll - self.reference_nll).abs()

    def decided(self, noise: torch.Tensor) -> torch.Tensor:
        """Where no two logits that each err by at most `noise` could change places at the top."""
        return self.margin > 2 * noise

    def top1(self, noise: torch.Tensor) -> float | None:
        """The share of decided tokens with the same largest logit; None where none is decided."""
        decided = self.decided(noise)
        return self.agrees[decided].double().mean().item() if decided.any() else None

    def as_dict(self, noise: torch.Tensor | None = None) -> dict:
        """Means over tokens. noise: the error of eager rounding on the same text, for top-1; the candidate's own if None."""
        noise = self.error if noise is None else noise
        nll, wide = self.nll.mean().item(), self.reference_nll.mean().item()
        return dict(
            name=self.name, tokens=len(self.tokens), nll=nll, perplexity=perplexity(nll), reference_nll=wide,
            reference_perplexity=perplexity(wide), kl=self.kl.mean().item(), kl_error=standard_error(self.kl),
            top1=self.top1(noise), decided=int(self.decided(noise).sum()),
        )


def perplexity(nll: float) -> float:
    """Of 700 and more, a float64 has no exponential."""
    return math.exp(nll) if nll < 700 else math.inf if nll == nll else math.nan


def standard_error(per_token: torch.Tensor) -> float:
    return (per_token.std() / len(per_token) ** 0.5).item() if len(per_token) > 1 else math.inf


@torch.no_grad()
def score(
    candidates: Mapping[str, Logits], reference: Logits, tokens: torch.Tensor | Sequence[int], window: int = WINDOW,
    batch: int = 1, device: Any = None,
) -> dict[str, Scores]:
    """Scores of each candidate on the text. Logits are held for batch * window tokens at a time, of two models.

    window   tokens that are seen together; each window begins without what came before
    batch    windows at once
    """
    text = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    if text.dim() != 1 or len(text) < 2:
        raise ValueError(f"score: tokens must be one row of at least 2, got shape {tuple(text.shape)}")
    if window < 1 or batch < 1:
        raise ValueError(f"score: window and batch must be at least 1, got {window} and {batch}")
    found: dict[str, list[torch.Tensor]] = {name: [] for name in candidates}
    for piece in windows(text, window, batch):
        given, following = piece[:, :-1], piece[:, 1:]
        with full_float32():
            wide = reference(given)
        for name, candidate in candidates.items():
            logits = candidate(given)
            if logits.shape != wide.shape:
                raise ValueError(f"score: {name} must give logits {tuple(wide.shape)}, got {tuple(logits.shape)}")
            found[name].append(against(logits.flatten(0, 1), wide.flatten(0, 1), following.flatten()).cpu())
    return {name: gathered(name, text[1:].cpu(), torch.cat(parts, dim=1)) for name, parts in found.items()}


def gathered(name: str, tokens: torch.Tensor, numbers: torch.Tensor) -> Scores:
    nll, reference_nll, kl, error, margin, agrees = numbers
    return Scores(name, tokens, nll, reference_nll, kl, error, margin, agrees > 0)


def windows(text: torch.Tensor, window: int, batch: int) -> Iterator[torch.Tensor]:
    """(B, T + 1) tokens each, one shared with the next, so that all but the first are predicted once."""
    full = (len(text) - 1) // window
    starts = text[: full * window].view(full, window)
    ends = text[window : full * window + 1 : window]
    for i in range(0, full, batch):
        yield torch.cat([starts[i : i + batch], ends[i : i + batch, None]], dim=1)
    if full * window < len(text) - 1:
        yield text[None, full * window :]


def against(logits: torch.Tensor, wide: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The six rows of Scores for logits (N, V), in float64, in blocks."""
    rows = max(1, ROW_BLOCK // wide.shape[1])
    out = []
    for a, r, token in zip(logits.split(rows), wide.split(rows), following.split(rows)):
        a, r = a.double(), r.double()
        log_q, log_p = a.log_softmax(1), r.log_softmax(1)
        kl = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum(1)
        nll, wide_nll = (-t.gather(1, token[:, None]).squeeze(1) for t in (log_q, log_p))
        top = r.topk(2, dim=1).values
        error = torch.where(a == r, 0.0, (a - r).abs()).amax(1)
        out.append(torch.stack([nll, wide_nll, kl, error, top[:, 0] - top[:, 1], (a.argmax(1) == r.argmax(1)).double()]))
    return torch.cat(out, dim=1)


@dataclass(frozen=True)
class Paired:
    """Ours less theirs, token by token: the mean, its standard error, and the least difference that would have been seen."""

    what: str
    ours: float
    theirs: float
    difference: float
    standard_error: float
    seen_from: float

    @property
    def worse(self) -> bool:
        return not self.difference <= self.seen_from  # NaN is worse


def paired(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> Paired:
    difference, error = (ours - theirs).mean().item(), standard_error(ours - theirs)
    return Paired(
        what, ours.mean().item(), theirs.mean().item(), difference, error, NormalDist().inv_cdf(1 - LEVEL) * error
    )


@dataclass(frozen=True)
class QualityVerdict:
    ok: bool
    why: str
    tokens: int
    kl: Paired
    nll: Paired
    top1: float | None
    decided: int

    def as_dict(self) -> dict:
        return asdict(self)


def not_worse(ours: Scores, theirs: Scores) -> QualityVerdict:
    """Whether ours is as near to the float32 reference as theirs, an eager model in the same dtype, on the same text.

    KL, NLL   the mean difference over tokens must not exceed what chance gives once in 1 / LEVEL. Of the NLL it is the
              distance from the reference's that counts: one that is lower by an error is no better
    top-1     must be the reference's wherever its margin exceeds the rounding that theirs shows at that very token
    """
    if not torch.equal(ours.tokens, theirs.tokens) or len(ours.tokens) < 2:
        texts = f"one text of at least 2 tokens, got {len(ours.tokens)} and {len(theirs.tokens)} tokens"
        raise ValueError(f"not_worse: {ours.name} and {theirs.name} must be scored on {texts}")
    kl, nll = paired("KL", ours.kl, theirs.kl), paired("NLL's distance", ours.moved, theirs.moved)
    top1, decided = ours.top1(theirs.error), int(ours.decided(theirs.error).sum())
    reasons = [
        f"{p.what} {p.ours:.3g} against {p.theirs:.3g}: {p.difference:.2g} more, {p.standard_error:.1g} by chance"
        for p in (kl, nll) if p.worse
    ]
    if top1 is not None and top1 < 1:
        reasons.append(f"top-1 differs at {round((1 - top1) * decided)} of {decided} tokens whose margin exceeds the rounding")
    return QualityVerdict(not reasons, "; ".join(reasons), len(ours.tokens), kl, nll, top1, decided)


def compare_quants(
    build: Callable[[], Any], text_tokens: torch.Tensor | Sequence[int], quants: Sequence[str] = QUANTS,
    run: Callable[[Any], Logits] = plain, window: int = WINDOW, batch: int = 1,
    more: Callable[[Any], Mapping[str, Logits]] = lambda model: {},
) -> dict[str, Scores]:
    """Scores of the model that `build` makes, as it is and in each quant; the first, under its dtype's name, gives the noise.

    run   how a model is asked for logits: plain, cached, or one's own
    more  other ways, by name, that are scored beside it
    """
    model = build()
    reference, device = plain(float32_reference(model)), model.embed.device
    name = str(model.embed.dtype).removeprefix("torch.")

    def ways(name: str) -> dict[str, Logits]:
        return {name: run(model)} | {f"{name}, {way}": logits for way, logits in more(model).items()}

    found = score(ways(name), reference, text_tokens, window, batch, device)
    for quant in quants:
        del model  # two models at a time: the reference and one more
        model = build()
        quantize(model, quant)
        found |= score(ways(quant), reference, text_tokens, window, batch, device)
    return found
