"""Optimizers of a training run: AdamW, Muon for hidden matrices, float32 masters of 16-bit weights, an average of the weights.

    optimizer = make(model, kind="muon", lr=3e-4, muon_lr=0.02)
    optimizer = make(model.to(torch.bfloat16), master=True)      # the model in bfloat16, the optimizer's copies in float32
    ema = Ema(model, 0.999, optimizer)

All are one torch.optim.Optimizer: a loop, a schedule, a CUDA graph and a checkpoint treat them alike.
"""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from whet.padding import logical_shapes, resized
from whet.train.muon import hidden_matrices, local, orthogonalized, orthogonalized_shares

KINDS = ("adamw", "muon")
FLAGS = ("fused", "capturable")  # of the machine, not of the run: loading a state keeps them


@dataclass(frozen=True)
class OptimOptions:
    """What `make` makes.

    kind          "adamw", or "muon": Muon for hidden matrices, AdamW for the rest
    lr            of AdamW
    muon_lr       of Muon, whose updates have a size that does not depend on the gradient's
    betas, eps    of AdamW
    weight_decay  decoupled; of parameters with two dimensions or more: norms and biases have none
    momentum      of Muon, Nesterov's
    master        16-bit weights get a float32 copy, which is what is updated; the model's are that, rounded
    adamw_names   patterns (as of a shell) of parameters that Muon leaves to AdamW, beside embeddings and the head
    """

    kind: str = "adamw"
    lr: float = 6e-4
    muon_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    master: bool = False
    adamw_names: tuple[str, ...] = ()

    def __post_init__(self):
        def check(name: str, fits: bool, words: str) -> None:
            if not fits:
                raise ValueError(f"optimizer: {name} must be {words}, got {getattr(self, name)!r}")

        def number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        check("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        for name in ("lr", "muon_lr", "eps"):
            check(name, number(getattr(self, name)) and getattr(self, name) > 0, "a number above 0")
        pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        check("betas", pair and all(number(b) and 0 <= b < 1 for b in self.betas), "two numbers from 0 to below 1")
        check("weight_decay", number(self.weight_decay) and self.weight_decay >= 0, "a number of at least 0")
        check("momentum", number(self.momentum) and 0 <= self.momentum < 1, "a number from 0 to below 1")
        names = isinstance(self.adamw_names, (tuple, list)) and all(isinstance(n, str) for n in self.adamw_names)
        check("adamw_names", names, "a list of patterns")


def make(model: nn.Module, options: OptimOptions | None = None, **changes: Any) -> "MuonAdamW":
    """The optimizer of a model that lies where it will be trained; `changes` are fields of OptimOptions.

    On CUDA AdamW is fused, and a CUDA graph can hold the step.
    """
    unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(OptimOptions)})
    if unknown:
        raise ValueError(f"optimizer: there is no option {unknown[0]}; there are {', '.join(OptimOptions.__annotations__)}")
    o = dataclasses.replace(options or OptimOptions(), **changes)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("optimizer: the model has no parameter that requires a gradient")
    if o.master and not any(_narrow(p) for p in trained.values()):
        raise ValueError("optimizer: master=True wants weights in 16 bits, got none; call model.to(torch.bfloat16) first")
    muon = hidden_matrices(model, o.adamw_names) if o.kind == "muon" else []
    if o.kind == "muon" and not muon:
        raise ValueError("optimizer: kind='muon' found no matrix that is no embedding and no head; use kind='adamw'")
    on_cuda = all(p.device.type == "cuda" for p in trained.values())
    parts: dict[tuple[str, float], list[Tensor]] = {("muon", o.weight_decay): [trained[name] for name in muon]}
    for name, p in trained.items():
        if name not in muon:
            parts.setdefault(("adamw", o.weight_decay if p.dim() >= 2 else 0.0), []).append(p)
    groups: list[dict] = [
        dict(params=params, rule=rule, weight_decay=decay, lr=o.muon_lr if rule == "muon" else o.lr)
        for (rule, decay), params in parts.items() if params
    ]
    if muon and (shapes := logical_shapes(model)):
        groups[0]["shapes"] = [list(shapes.get(id(p), p.shape)) for p in groups[0]["params"]]
    return MuonAdamW(groups, o, capturable=on_cuda)


def _narrow(p: Tensor) -> bool:
    return p.dtype in (torch.bfloat16, torch.float16)


class MuonAdamW(torch.optim.Optimizer):
    """AdamW and Muon in one optimizer: each group names its `rule` and keeps its `base_lr`. Made by `make`.

    Its state is complete from the start and changed in place, so that a CUDA graph may be captured before the first step and
    stays valid when a state is loaded; cleared, it is made anew. A 16-bit parameter's float32 master is state[p]["master"].
    """

    def __init__(self, groups: list[dict], options: OptimOptions, capturable: bool):
        o = options
        defaults = dict(
            rule="adamw", lr=o.lr, base_lr=o.lr, betas=tuple(o.betas), eps=o.eps, weight_decay=o.weight_decay,
            momentum=o.momentum, master=o.master, fused=capturable, capturable=capturable,
        )
        super().__init__([dict(group, base_lr=group["lr"]) for group in groups], defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self._new_state(p, group)

    @staticmethod
    def _new_state(p: Tensor, group: dict) -> dict[str, Tensor]:
        kept = {"master": p.detach().to(torch.float32, copy=True)} if group["master"] and _narrow(p) else {}
        like = kept.get("master", p.detach())
        if group["rule"] == "muon":
            return kept | {"momentum": torch.zeros_like(like)}
        step = torch.zeros((), dtype=torch.float32, device=p.device if group["capturable"] else "cpu")
        return kept | {"step": step, "exp_avg": torch.zeros_like(like), "exp_avg_sq": torch.zeros_like(like)}

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient. Nothing waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = self._new_state(p, group)
            states = [self.state[p] for p in params]
            weights = [s.get("master", p) for p, s in zip(params, states)]
            grads = [p.grad.to(w.dtype) for p, w in zip(params, weights)]
            if group["rule"] == "muon":
                logical = dict(zip(group["params"], group.get("shapes", ())))
                self._muon(group, weights, grads, states, [tuple(logical.get(p, p.shape)) for p in params])
            else:
                self._adamw(group, weights, grads, states)
            rounded = [(p, w) for p, w in zip(params, weights) if w is not p]
            if rounded:
                torch._foreach_copy_(local(p for p, _ in rounded), local(w for _, w in rounded))
        return loss

    @staticmethod
    def _adamw(group: dict, weights: list[Tensor], grads: list[Tensor], states: list[dict]) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            weights, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
            foreach=False, capturable=group["capturable"], differentiable=False, fused=group["fused"], amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )

    @staticmethod
    def _muon(
        group: dict, weights: list[Tensor], grads: list[Tensor], states: list[dict], shapes: list[tuple[int, ...]]
    ) -> None:
        """w -= lr * (orthogonalized(Nesterov momentum) * max(1, rows / columns)^0.5 + weight_decay * w); one batch a shape.

        shapes   whose rows and columns count: of a weight that is stored padded its logical ones
        """
        momentum, averages, grads = group["momentum"], local(s["momentum"] for s in states), local(grads)
        torch._foreach_lerp_(averages, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, averages, momentum)
        alike = defaultdict(list)
        for w, update, shape in zip(weights, ahead, shapes):
            alike[shape, w.shape, w.dtype, w.device].append((w, update))
        for (shape, *_), pairs in alike.items():
            first, mine = pairs[0][0], local(w for w, _ in pairs)
            updates = torch.stack([update for _, update in pairs])
            updates = orthogonalized_shares(updates, first) if isinstance(first, DTensor) else orthogonalized(updates)
            updates.mul_(max(1.0, shape[0] / shape[1]) ** 0.5)
            if group["weight_decay"]:
                torch._foreach_add_(list(updates.unbind()), mine, alpha=group["weight_decay"])
            updates.mul_(group["lr"])
            torch._foreach_sub_(mine, list(updates.unbind()))

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, in place and bit for bit: torch would round float32 masters to the dtype of their parameter."""
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        saved = [state_dict["state"].get(i, {}) for i in ids]
        kept, flags = dict(self.state), [{k: group[k] for k in (*FLAGS, "shapes") if k in group} for group in self.param_groups]

        def shapes(state: dict[str, Tensor]) -> str:
            return ", ".join(f"{name} {tuple(t.shape)}" for name, t in sorted(state.items())) or "none"

        for i, (p, given) in enumerate(zip(params, saved)):
            if shapes(given) != shapes(kept[p]):
                raise ValueError(f"optimizer: parameter {i} has state {shapes(kept[p])}, and is given {shapes(given)}")
        super().load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, flags):
            group.update(mine)
        self.state.clear()
        self.state.update(kept)
        for p, given in zip(params, saved):
            for name, tensor in self.state[p].items():
                tensor.copy_(given[name])


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """An optimizer but for its tensors, as JSON: its parameters' names, its groups' settings, and numbers among its state."""
    names = {id(p): name for name, p in model.named_parameters()}
    params = parameters_of(optimizer)
    groups: list[dict] = [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in g.items() if k != "shapes"} for g in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__name__,
        "parameters": [names.get(id(p), f"parameter {i}") for i, p in enumerate(params)],
        "groups": [group | {"params": len(group["params"])} for group in groups],
        "values": {
            f"{i}.{name}": v for i, p in enumerate(params) for name, v in optimizer.state.get(p, {}).items()
            if not isinstance(v, Tensor)
        },
    }


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The tensors of any optimizer's state, as '<index of parameter>.<name>'.

    model   of which parameters may be stored padded (whet.pad_weights): their state is given cut to the logical shape, as views
    """
    shapes = logical_shapes(model) if model is not None else {}
    found = {}
    for i, p in enumerate(parameters_of(optimizer)):
        for name, v in optimizer.state.get(p, {}).items():
            if isinstance(v, Tensor):
                found[f"{i}.{name}"] = resized(v, tuple(p.shape), shapes[id(p)], name) if id(p) in shapes else v
    return found


def restore(optimizer: torch.optim.Optimizer, described: dict, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """What `describe` and `state_tensors` gave of a like optimizer, put in place; settings of the machine stay."""
    shapes = logical_shapes(model)
    owners = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for key, value in (*tensors.items(), *described["values"].items()):
        index, _, name = key.partition(".")
        p, group = owners[int(index)]
        kept = optimizer.state[p]
        if id(p) in shapes and isinstance(value, Tensor):
            value = resized(value, shapes[id(p)], tuple(p.shape), name)
        if isinstance(kept.get(name), Tensor):
            kept[name].copy_(value)
        elif isinstance(value, Tensor) and (name != "step" or any(group.get(k) for k in FLAGS)):
            kept[name] = value.to(p.device)  # torch keeps the step on the host where AdamW is neither fused nor capturable
        else:
            kept[name] = value
    for group, saved in zip(optimizer.param_groups, described["groups"]):
        for name, setting in saved.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(setting)
            elif name not in ("params", "foreach", "shapes", *FLAGS):
                group[name] = tuple(setting) if isinstance(setting, list) else setting


class Ema:
    """An exponential moving average of the trained weights, in float32 where those have 16 bits.

    Of weights that are sharded over processes each process averages its share.
    decay      average = decay * average + (1 - decay) * weights, at each update()
    optimizer  one with float32 masters, which are then averaged in the place of the rounded weights
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, optimizer: torch.optim.Optimizer | None = None):
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(f"ema: decay must be a number from 0 to below 1, got {decay!r}")
        self.decay, self.optimizer = decay, optimizer
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tensors = {name: w.clone() for name, w in zip(self.params, self._weights())}

    def _weights(self) -> list[Tensor]:
        state: Any = self.optimizer.state if self.optimizer is not None else {}
        held = [state.get(p, {}).get("master", p).detach() for p in self.params.values()]
        return [w.float() if _narrow(w) else w for w in held]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now: after each step of the optimizer."""
        torch._foreach_lerp_(local(self.tensors.values()), local(self._weights()), 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """While it is on, the model has the averaged weights, for evaluation; afterwards its own, bit for bit."""
        with torch.no_grad():
            params = local(self.params.values())
            own = [p.clone() for p in params]
            torch._foreach_copy_(params, local(self.tensors.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, own)
