"""Every recogniser over one live model: what each finds is proved, then replaced; what fails is left, with the reason."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from whet.choices import Choices
from whet.figures import error_line
from whet.judge import Verdict
from whet.swap import Edit, Journal, Left, Met, Site, discover
from whet.swap._alike import found_once
from whet.swap._proof import laid_as, prove_forms, random_kept

ROWS, LENGTH = 2, 48  # of the batch that the proof runs on at most
Known = Callable[[list[Site], dict[str, Met], Choices], dict[int, Verdict]]


@dataclass
class Replaced:
    """What was replaced in a model, what was not, and how to put it back."""

    model: nn.Module
    sites: list[tuple[Site, Verdict]] = field(default_factory=list)
    covered: list[Site] = field(default_factory=list)  # without effect while what covers them is kept, so not proved yet
    seen: dict[str, Met] = field(default_factory=dict)  # what those are called with
    known: dict[int, Verdict] = field(default_factory=dict)  # by the id of a site that needs no proof of its own
    proposed: list[Site] = field(default_factory=list)  # all that recognisers found, right or not
    left: list[Left] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    last: tuple[Choices, list[Site], list[Edit]] | None = None  # made once for a race, whose every round asks anew

    def ask(self, ops: Choices, sites: list[tuple[Site, Verdict]] | None = None) -> None:
        """From now on the replaced parts ask these choices. sites: other forms of them, for a while."""
        self.journal.undo()
        asked = [site for site, _ in (self.sites if sites is None else sites)]
        if self.last is not None and self.last[0] is ops and self.last[1] == asked:
            self.journal.make(self.last[2])
            return
        for site in asked:
            self.journal.make(site.edits(site.module, ops))
        self.last = ops, asked, [edit for edit, _ in self.journal.made]

    def restore(self) -> None:
        self.journal.undo()


def as_calls(batch: Any) -> list[Met]:
    """The calls of one batch, or of several: a list of mappings or of tuples is several. The largest comes first."""
    several = isinstance(batch, list) and batch and (
        all(isinstance(b, Mapping) for b in batch) or all(isinstance(b, tuple) for b in batch)
    )
    return sorted(map(as_call, batch), key=elements, reverse=True) if several else [as_call(batch)]


def elements(call: Met) -> int:
    """Of all tensors of a call."""
    return sum(t.numel() for t in tree_flatten((call.args, call.kwargs))[0] if isinstance(t, torch.Tensor))


def size_of(call: Met) -> str:
    """'4 x 2,048': the first tensor that has sizes."""
    tensors = [t for t in tree_flatten((call.args, call.kwargs))[0] if isinstance(t, torch.Tensor) and t.dim()]
    return " x ".join(f"{n:,}" for n in tensors[0].shape) if tensors else "no tensor"


def as_call(batch: Any) -> Met:
    """What a model's forward is given: a mapping by name, a tuple in order, or one tensor."""
    if isinstance(batch, Mapping):
        return Met((), dict(batch))
    if isinstance(batch, (tuple, list)):
        return Met(tuple(batch), {})
    if isinstance(batch, torch.Tensor):
        return Met((batch,), {})
    kind = type(batch).__name__
    raise ValueError(f"optimize: batch must be a dict, a tuple or a tensor of what the model's forward takes, got {kind}")


def cut(call: Met) -> Met:
    """A small part of a batch: a few rows; of what is (rows, length), a few tokens of each.

    Where tokens are masked, or documents packed, the part has such an edge in its middle and a row with it.
    """
    tensors = [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, torch.Tensor) and t.dim()]
    rows = tensors[0].shape[0] if tensors else 0
    row, length, at = edge(call, rows)
    taken = slice(ROWS) if row < ROWS else slice(0, row + 1, row)  # the first row, and the one with the edge
    start = max(0, min(at - LENGTH // 2, length - LENGTH))

    def one(t):
        if not isinstance(t, torch.Tensor) or not t.dim() or t.shape[0] != rows:
            return t
        if t.dim() != 2 or t.is_floating_point():
            part = t[taken]
        else:
            part = t[taken, start : start + LENGTH] if t.shape[1] == length else t[taken, :LENGTH]
        return part.contiguous() if t.is_contiguous() else part  # a model may view it

    return Met(tree_map(one, call.args), tree_map(one, call.kwargs))


def edge(call: Met, rows: int) -> tuple[int, int, int]:
    """(row, length, column): where a row's padding begins or ends, or a packed document starts; (0, 0, 0): there is none."""
    mask, positions = (call.kwargs.get(name) for name in ("attention_mask", "position_ids"))
    for t, step in ((mask, 0), (positions if mask is None else None, 1)):
        if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[0] == rows and not t.is_floating_point():
            found = (t.long().diff(dim=1) != step).nonzero()
            if len(found):
                row, column = found[0].tolist()
                return row, t.shape[1], column + 1
    return 0, 0, 0


def kept(value: Any) -> Any:
    """A call's arguments as they are now: tensors cloned, since the call may change them."""
    def one(v):
        return laid_as(v, v.dtype).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v

    return tree_map(one, value)


def met_in(model: nn.Module, call: Met, only: set[str] | None = None) -> dict[str, Met]:
    """What every module, or only those at these paths, is called with, first, in a forward of this batch."""
    found: dict[str, Met] = {"": call}
    journal = Journal()
    with quiet(model), uncached(model):
        try:
            for path, module in model.named_modules():
                if path and (only is None or path in only) and not isinstance(module, torch.jit.ScriptModule):
                    journal.make([Edit(module, "forward", noting(module.forward, path, found))])
            model(*kept(call.args), **kept(call.kwargs))
        finally:
            journal.undo()
    return found


def noting(forward: Callable, path: str, found: dict[str, Met]) -> Callable:
    """A forward that notes its first call; not a hook, since a wrapper such as a PEFT model calls .forward itself."""
    def noted(*args, **kwargs):
        found.setdefault(path, Met(kept(args), kept(kwargs)))
        return forward(*args, **kwargs)

    return noted


@contextlib.contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """A Hugging Face model keeps no keys and values of a forward: a cache is one object that every layer changes."""
    journal, configs = Journal(), [getattr(m, "config", None) for m in model.modules()]  # a decoder may have its own
    for config in {id(c): c for c in configs}.values():
        if getattr(config, "use_cache", False) is True:
            journal.make([Edit(config, "use_cache", False)])
    try:
        yield
    finally:
        journal.undo()


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Random numbers and buffers of the model are afterwards as they were."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with random_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for b, before in buffers:
                    if not torch.equal(b, before):  # a graph that is alive may have saved it as it is
                        b.copy_(before)


def recognise(
    model: nn.Module, call: Met, ops: Choices, only: tuple[str, ...] = (), keep_logits: bool | None = None,
    known: Known = lambda sites, seen, ops: {}, train: bool = True,
) -> Replaced:
    """Find and prove, without changing the model.

    only   names of recognisers; keep_logits as optimize() takes it
    known  known(sites, what modules met, ops) -> {id of a site: its verdict} of those that need no proof of their own
    train  False: recognisers are asked with gradients disabled, as the model then runs
    """
    found, seen = Replaced(model), met_in(model, cut(call))
    proved: dict[int, tuple[Site, Verdict]] = {}
    with uncached(model):
        with found_once(), contextlib.nullcontext() if train else torch.no_grad():
            sites = _proposed(model, seen, only, found, keep_logits)
        verdicts, gone = known(sites, seen, ops), set[tuple[str, str]]()
        for site in sorted(sites, key=lambda s: not s.covers):
            if (site.kind, site.path) in gone:
                found.covered.append(site)
            elif id(site) in verdicts or not site.alone:
                proved[id(site)] = site, verdicts.get(id(site), Verdict(True, 0.0, float("inf")))
            elif made := _proved(site, found, seen, ops):
                proved[id(site)] = made
            gone |= set(site.covers) if id(site) in proved else set()
    found.known, found.proposed = verdicts, sites
    found.sites = [proved[id(site)] for site in sites if id(site) in proved]
    found.seen = {site.path: seen[site.path] for site in found.covered}
    return found


def prove_covered(found: Replaced, ops: Choices, wanted: set[tuple[str, str]]) -> list[tuple[Site, Verdict]]:
    """Those of the covered sites, by kind and path, that are right: what covers them is not kept after all."""
    with uncached(found.model):
        tried = [
            (site, found.known[id(site)]) if id(site) in found.known else _proved(site, found, found.seen, ops)
            for site in found.covered if (site.kind, site.path) in wanted
        ]
    return [made for made in tried if made]


def _proved(site: Site, found: Replaced, seen: dict[str, Met], ops: Choices) -> tuple[Site, Verdict] | None:
    """The site in those of its forms that are right; why another is not is noted."""
    proofs = prove_forms(site, seen[site.path], ops)
    right = {form: v for form, v in proofs.items() if v.ok}
    for form, verdict in proofs.items():
        if not verdict.ok:
            words = f"{site.words}, {form}" if form and len(proofs) > 1 else site.words
            found.left.append(Left(site.path, f"{words}: {verdict.why}", site.kind))
    return (site.with_forms(right), max(right.values(), key=lambda v: v.share)) if right else None


def drops_too_much(site: Site, keep_logits: bool | None) -> str | None:
    if not site.drops or keep_logits is False or (keep_logits is None and site.drops == "unless kept"):
        return None
    return f"{site.words}: the model's logits are kept; with optimize(keep_logits=False) they may be None in training"


def _proposed(
    model: nn.Module, seen: dict[str, Met], only: tuple[str, ...], found: Replaced, keep_logits: bool | None
) -> list[Site]:
    """What every recogniser would replace, not yet proved; what it leaves is noted."""
    sites = []
    for name, find in discover().items():
        if only and name not in only:
            continue
        try:
            proposals = list(find(model, seen))
        except Exception as e:  # a recogniser that fails costs its candidates, never the model
            found.left.append(Left("", f"the recogniser failed: {error_line(e)}", name))
            continue
        for item in proposals:
            if isinstance(item, Left):
                found.left.append(replace(item, kind=name))
                continue
            if why := drops_too_much(item, keep_logits):
                found.left.append(Left(item.path, why, name))
                continue
            sites.append(replace(item, kind=name))
    return sites
