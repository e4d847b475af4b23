"""RMSNorm and LayerNorm modules, known by what they compute: by weight, by 1 + weight (Gemma), or without one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whet.ops.layer_norm import reference as layer_norm
from whet.ops.rms_norm import reference as rms_norm
from whet.swap import Left, Met, Site, new_forward
from whet.swap._alike import alike
from whet.swap._proof import close, in_float64, plainly_called

CLOSE = 1e-5  # of the size of the result: which formula it is; `prove` then holds it to the usual budget
SCALES = (1.0, 1e-3)  # of the probe: small values show what eps is


def weight(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight


def one_plus(module: Any, x: torch.Tensor) -> torch.Tensor:
    return 1.0 + module.weight.float()


def ones(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)


FORMS: dict[str, tuple[str, Callable]] = {
    "RMSNorm": ("rms_norm", weight), "RMSNorm by 1 + weight": ("rms_norm", one_plus),
    "RMSNorm without a weight": ("rms_norm", ones), "LayerNorm": ("layer_norm", weight),
    "LayerNorm without a weight": ("layer_norm", ones),
}


UNCLEAR = -1.0
OWN_CLOSE = 0.05  # of a module in its own dtype, on small values: whether its eps is float32's or bfloat16's


def eps_of(module: nn.Module) -> float | None:
    """The one number of a module that is called an epsilon; None is torch's own, which goes by the dtype."""
    values = {v for k, v in vars(module).items() if "eps" in k.lower() and (v is None or isinstance(v, float))}
    return values.pop() if len(values) == 1 else UNCLEAR


def eps_in(eps: float | None, x: torch.Tensor) -> float:
    """As F.rms_norm takes None: the machine epsilon of what it computes in."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


def looks_like_one(module: nn.Module) -> bool:
    """No children, at most a weight and a bias of one dimension, and an epsilon."""
    params = dict(module.named_parameters(recurse=False))
    vectors = all(p.dim() == 1 for p in params.values()) and set(params) <= {"weight", "bias"}
    return not any(module.children()) and vectors and any("eps" in k.lower() for k in vars(module))


def form_of(module: nn.Module, x: torch.Tensor, eps: float | None) -> str | None:
    """Which formula gives what the module gives."""
    params = {n: p.detach().double() for n, p in module.named_parameters(recurse=False)}
    has_weight = "weight" in params
    for form, (op, _) in FORMS.items():
        if has_weight == form.endswith("without a weight"):
            continue
        if not all(_same(module, op, form, params, x.detach().double() * scale, eps) for scale in SCALES):
            continue
        if eps is not None or _same(module, op, form, params, x.detach() * SCALES[-1], eps, OWN_CLOSE):
            return form
    return None


def _same(module: nn.Module, op: str, form: str, params: dict, x: torch.Tensor, eps: float | None, share=CLOSE) -> bool:
    eps = eps_in(eps, x)
    with torch.no_grad():
        got = in_float64(module, x) if x.dtype == torch.float64 else module(x).double()
    x = x.double()
    w = params.get("weight", torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))
    w = 1.0 + w if "1 +" in form else w
    want = rms_norm(x, w, eps) if op == "rms_norm" else layer_norm(x, w, params.get("bias"), eps)
    return close(got, want, share)


def replaced(ops, form: str, eps: float | None, biased: bool) -> Callable:
    """The forward of a norm through an op; a call with more than a tensor gets the module's own."""
    op, weight_of = FORMS[form]
    norm = getattr(ops, op)

    def rms(self, x, *rest, **options):
        return self._whet_forward(x, *rest, **options) if rest or options else norm(x, weight_of(self, x), eps_in(eps, x))

    def layer(self, x, *rest, **options):
        if rest or options:
            return self._whet_forward(x, *rest, **options)
        return norm(x, weight_of(self, x), self.bias if biased else None, eps_in(eps, x))

    return rms if op == "rms_norm" else layer


@dataclass(frozen=True)
class KnownNorm:
    """A norm's class and the formula that gives what it gives; eps None is torch's own, which goes by the dtype."""

    type: type
    form: str
    eps: float | None
    words: str

    @property
    def op(self) -> str:
        """rms_norm or layer_norm."""
        return FORMS[self.form][0]

    def arguments(self, module: nn.Module, x: torch.Tensor) -> tuple:
        """What its op takes after x: the weight, the bias of a LayerNorm, eps."""
        w, eps = FORMS[self.form][1](module, x), eps_in(self.eps, x)
        return (w, eps) if self.op == "rms_norm" else (w, getattr(module, "bias", None), eps)


def known_norm(module: nn.Module, call: Met) -> KnownNorm | str | None:
    """What a norm computes; or why it is left; None: the module is none."""
    if not looks_like_one(module):
        return None
    if not plainly_called(call) or not call.args[0].is_floating_point():
        return "it is called with more than one tensor"
    x, eps = call.args[0], eps_of(module)
    if eps == UNCLEAR:
        return "which of its numbers is the epsilon is not clear"
    form = alike(module, (form_of, x.shape[-1], x.dtype), lambda: form_of(module, x, eps))
    if form is None:
        return f"{type(module).__name__} computes neither an RMSNorm nor a LayerNorm over its last dimension"
    return KnownNorm(type(module), form, eps, f"{form} of {x.shape[-1]}, eps {eps_in(eps, x):g}")


def norms_in(path: str, module: nn.Module, met: dict[str, Met], *ops: str) -> Iterator[tuple[str, str, KnownNorm]]:
    """(name, path, formula) of the children of a module that are norms by one of these ops."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        norm = known_norm(child, met[where]) if where in met else None
        if isinstance(norm, KnownNorm) and norm.op in ops:
            yield name, where, norm


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        norm = known_norm(module, met[path]) if path in met else None
        if isinstance(norm, str):
            yield Left(path, norm)
        if not isinstance(norm, KnownNorm):
            continue

        def edits(module, ops, norm=norm):
            return new_forward(module, replaced(ops, norm.form, norm.eps, getattr(module, "bias", None) is not None))

        yield Site(path, module, edits, norm.words)
