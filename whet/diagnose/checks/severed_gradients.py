"""Parameters that a training step leaves without a gradient, and the op that cut the graph between them and the loss."""

import contextlib
import itertools
from dataclasses import replace

import torch
from torch import nn

from whet.diagnose.flow import FORMULALESS, STATES, Cut, MadeTensor, NotFinite, Trace, trace
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.figures import percent

USUAL = (1.5, 3.0)  # backward over forward time of a whole graph: two products for each of the forward's
UNUSED = "what they compute"
NAMED = 4  # parameters named in the evidence, of however many


def suspects(run: Run) -> dict[str, str]:
    """Parameters to look at: trained ones whose gradient is missing. With a step of the user's own, all: it may clear them."""
    target = run.target
    trained = {n: p for n, p in target.model.named_parameters() if p.requires_grad and p.numel()}
    if target.optimizer is not None:
        held = {id(p) for group in target.optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in trained.items() if id(p) in held}
    if target.kind == "train" and target.step_with is None:
        return {n: s for n in trained if (s := run.watched.grads.get(n, "ok")) != "ok"}
    if target.kind == "train":
        return dict.fromkeys(trained, "none")
    if target.step_with is None and trained and target.model.training:
        with torch.enable_grad():
            loss = target.loss(target.forward())
        if loss is not None and not loss.requires_grad:  # a scalar that nothing can be learned from
            return dict.fromkeys(trained, "none")
    return {}


def cut_of(t: Trace, name: str) -> Cut | None:
    """What keeps the gradient from one parameter; None where it is not used at all."""
    bit, flow = t.bit(name), t.flow
    if t.states[name] == "nan" and flow.bad is not None:
        return not_finite(flow.bad)
    if t.states[name] == "zero" and flow.dead is not None:
        return in_forward(flow.dead, "gives zeros alone", "Scale or shift its input so that something gets through", "zero")
    for cut in t.nodes.cuts if t.nodes else ():
        if cut.bits & bit and cut.state == t.states[name]:
            return named_op(cut, flow.customs)
    if not flow.used & bit and not any(c.bits & bit for c in flow.cuts.values()):
        return None
    cuts = [(i, c) for i, c in enumerate(flow.cuts.values()) if c.bits & bit]
    behind = [c for i, c in cuts if t.behind >> i & 1]
    if behind:
        return min(behind, key=lambda c: not c.differentiable)
    last = max((m for bits, m in flow.last.items() if bits & bit), key=lambda m: m.at, default=None)
    if last is None:
        return cuts[0][1]
    if last.op in ("aten::detach", "aten::_local_scalar_dense"):
        what = "leaving torch (.item(), .numpy(), .tolist())"
        return Cut(what, "cuts the graph", last.line, "Keep the computation in tensors", modules={last.module: None})
    fix = "Add it to the loss, do not compute it, or set requires_grad to False on its parameters"
    return Cut(UNUSED, "never reaches the loss", last.line, fix, wrong=False, modules={last.module: None})


def not_finite(bad: NotFinite) -> Cut:
    """The tensor itself, with the module and the line where it is first read or made."""
    if bad.what == bad.by.op:
        return in_forward(bad.by, bad.does, "Keep its input inside its domain (a clamp, an eps, a wider dtype)", "nan")
    where = (f" at {bad.by.line}" if bad.by.line else "") + (f" in {bad.by.module}" if bad.by.module else "")
    fix = f"Look at where {bad.what} comes from: its initialisation, a checkpoint, the data, or a step that overflowed"
    cause = f"{bad.what} {bad.does}; it is first read{where}"
    return Cut(bad.what, bad.does, bad.by.line, fix, "nan", modules={bad.by.module: None}, cause=cause)


def branch(names: list[str], last: str) -> str:
    """The module whose output goes unused: around these parameters, and around the last op where that is in it too."""
    owners = [n.rpartition(".")[0].split(".") for n in names]
    for around in ([*owners, last.split(".")], owners):
        same = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*around))]
        if any(same):
            return ".".join(same)
    return ", ".join(dict.fromkeys(pattern(n.rpartition(".")[0]) or n for n in names))


def named_op(cut: Cut, customs: dict[str, str]) -> Cut:
    """The op by its name, where autograd knows no more of it than that it has no formula."""
    op = customs.get(cut.line) if cut.what == FORMULALESS else None
    return replace(cut, what=op, fix=f"Register a formula for {op} with torch.library.register_autograd") if op else cut


def in_forward(made: MadeTensor, does: str, fix: str, state: str) -> Cut:
    return Cut(made.op, does, made.line, fix, state, modules={made.module: None})


def find(run: Run):
    suspected = suspects(run)
    if not suspected:
        return
    t = trace(run.target, list(suspected), nudge="zero" in suspected.values() or run.target.step_with is not None)
    severed = [n for n in suspected if t.states[n] != "ok"]
    sound = {pattern(n) for n, s in run.watched.grads.items() if s == "ok"}
    groups: dict[tuple, tuple[Cut | None, list[str]]] = {}
    for name in severed:
        cut = cut_of(t, name)
        if cut is None and pattern(name) in sound and pattern(name) != name:
            continue  # one of several of its kind, as an expert to which no token went
        key = (cut.what, cut.does, cut.line) if cut else ()
        groups.setdefault(key, (cut, []))[1].append(name)
    for cut, names in groups.values():
        yield finding(run, t, cut, names)


def finding(run: Run, t: Trace, cut: Cut | None, names: list[str]) -> Finding:
    named = dict(run.target.model.named_parameters())
    share = sum(named[n].numel() for n in names) / max(1, sum(p.numel() for p in named.values()))
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    whole = f"{some}: {percent(share)} of the model's parameters"
    if cut is None:
        return Finding(
            "severed_gradients", f"{some} never used in this step", [whole, "no op of the forward reads them"],
            "Use them, or take them out of the model", module=names[0].rpartition(".")[0],
        )
    kept = STATES[t.states[names[0]]]
    where = ", ".join(dict.fromkeys(pattern(m) or "the model's own forward" for m in cut.modules))
    at = f" at {cut.line}" if cut.line else f" in {where}"
    cause = f"{cut.what}{at} {cut.does}: {some if len(names) == 1 else count} left with {kept}"
    if cut.what == UNUSED:
        cause = f"the output of {branch(names, next(iter(cut.modules), ''))} {cut.does}"
    elif cut.cause:
        cause = f"{cut.cause}: {some if len(names) == 1 else count} left with {kept}"
    evidence = [f"{kept}: {whole}", f"in {where}" + (f", {cut.line}" if cut.line else "")]
    evidence += ratio(run) if cut.wrong and cut.state != "nan" else []
    module = next(iter(cut.modules), "")
    return Finding("severed_gradients", cause, evidence, cut.fix, wrong=cut.wrong, line=cut.line, module=module)


def ratio(run: Run) -> list[str]:
    """Backward over forward time, where a profile can be had and it gives the cut away."""
    with contextlib.suppress(Exception):
        whole = run.profile.under("")
        if whole.forward_us and run.target.kind == "train" and (r := whole.backward_us / whole.forward_us) < USUAL[0]:
            return [f"the backward takes {r:.2f} of the forward's time; a whole graph takes {USUAL[0]:g} to {USUAL[1]:g}"]
    return []


class SeveredExample(nn.Module):
    def __init__(self, cut: bool):
        super().__init__()
        self.embed, self.head, self.cut = nn.Embedding(50, 32), nn.Linear(32, 50), cut
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))

    def forward(self, tokens, labels):
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + block(h)
        if self.cut:
            h = h.detach()
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def example(cut: bool) -> Target:
    torch.manual_seed(0)
    tokens = torch.randint(50, (4, 16))
    return target_of("example", (SeveredExample(cut), dict(tokens=tokens, labels=tokens)))


CHECK = Check(
    "severed_gradients", "parameters without a gradient", find, lambda: example(True), lambda: example(False),
    kinds=("train", "forward"),
)
