"""Rotary embedding in Hugging Face attention: `apply_rotary_pos_emb(q, k, cos, sin)` as this one module's forward calls it."""

import inspect
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from whet.swap import Left, Met, Site, new_forward
from whet.swap._few import few, fewest_rows
from whet.swap._globals import plain_function, with_globals

NAME = "apply_rotary_pos_emb"
ARGUMENTS = ("q", "k", "cos", "sin")


def own_forward(module: nn.Module) -> types.FunctionType | None:
    """The function behind this module's forward, where it is plain Python that names the rotation."""
    forward = plain_function(module.forward)
    if forward is None or NAME not in forward.__code__.co_names:
        return None
    return forward if callable(forward.__globals__.get(NAME)) else None


def plain_options(rest: tuple, options: dict) -> bool:
    """Whether a call of the rotation asks for nothing else than heads in the second dimension."""
    return not rest and options in ({}, {"unsqueeze_dim": 1})


def tables_and_rows(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | torch.Tensor]:
    """Tables (P, R/2) and positions as ops take them, of cos and sin (1 or B, S, R), each half of a row the same."""
    half = cos.shape[-1] // 2
    if cos.shape[0] == 1:
        return cos[0, :, :half], sin[0, :, :half], 0
    rows = torch.arange(cos.shape[0] * cos.shape[1], device=cos.device).view(cos.shape[:2])
    return cos[..., :half].flatten(0, 1), sin[..., :half].flatten(0, 1), rows


def rotation(ops, theirs: Callable) -> Callable:
    """The same function through ops.rope.

    At sizes that were not measured the module's own: the stock call of the op takes longer.
    """
    rope, measured = ops.rope, {}  # type: Callable, dict[tuple, bool]

    def known(q, k, cos, sin) -> bool:
        if torch.compiler.is_compiling():
            return True
        key = q.shape, k.shape, q.stride(), q.dtype, cos.shape, torch.is_grad_enabled() and q.requires_grad
        if key not in measured:
            if len(measured) > 4096:  # lengths that never repeat
                measured.clear()
            measured[key] = ops.measured("rope", q, k, *tables_and_rows(cos, sin))
        return measured[key]

    def apply_rotary_pos_emb(q, k, cos, sin, *rest, **options):
        own = not plain_options(rest, options)
        if own or cos.dim() != 3 or q.dim() != 4 or k.dim() != 4 or q.shape[2] != cos.shape[1] or not known(q, k, cos, sin):
            return theirs(q, k, cos, sin, *rest, **options)
        return rope(q, k, *tables_and_rows(cos, sin))

    return apply_rotary_pos_emb


def find(model: nn.Module, met: dict[str, Met]) -> Iterator[Site | Left]:
    for path, module in model.named_modules():
        forward = own_forward(module)
        if path not in met or forward is None:
            continue
        given = tuple(inspect.signature(forward.__globals__[NAME]).parameters)
        if given[:4] != ARGUMENTS:
            yield Left(path, f"its {NAME} takes ({', '.join(given)}), not ({', '.join(ARGUMENTS)})")
            continue

        fewest = fewest_rows(met[path])

        def edits(module, ops, fewest=fewest):
            function = own_forward(module)
            assert function is not None
            served = with_globals(function, **{NAME: rotation(ops, function.__globals__[NAME])})

            def either(self, *args, **kwargs):
                return (function if few(args, kwargs, fewest) else served)(self, *args, **kwargs)

            return new_forward(module, either)

        yield Site(path, module, edits, "rotary embedding of queries and keys")
