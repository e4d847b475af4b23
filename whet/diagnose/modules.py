"""Which module is at work: forward by hooks on modules, backward by hooks on the autograd nodes that its forward made."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Enter = Callable[[str, str], object]  # (phase, path) -> anything with close(), or None


def tensors_in(value) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and objects with fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, SimpleNamespace) or is_dataclass(value) and hasattr(value, "__dict__"):
        for v in () if isinstance(value, type) else vars(value).values():
            yield from tensors_in(v)


class Modules:
    """While it is on, `path` and `phase` say what is at work; `entering(phase, path)` is told, and what it returns is closed.

    Paths are those of named_modules(); the model itself is "". A node of the autograd graph belongs to the innermost module
    in whose forward it was made.
    """

    def __init__(self, model: nn.Module, entering: Enter = lambda phase, path: None):
        self.paths = {id(m): name for name, m in model.named_modules()}
        self.entering = entering
        self.stack: list[tuple[str, str, object]] = []
        self.seen: dict[object, None] = {}  # nodes already owned; kept alive, so that no id is used twice

    @property
    def path(self) -> str:
        return self.stack[-1][1] if self.stack else ""

    @property
    def phase(self) -> str:
        return self.stack[-1][0] if self.stack else "forward"

    def push(self, phase: str, path: str) -> None:
        self.stack.append((phase, path, self.entering(phase, path)))

    def pop(self) -> None:
        _, _, opened = self.stack.pop()
        if opened is not None:
            opened.close()  # type: ignore[attr-defined]

    def own(self, value, path: str) -> None:
        """Every node behind these tensors that has no owner yet gets this one."""
        if not torch.is_grad_enabled():
            return
        waiting = [t.grad_fn for t in tensors_in(value) if t.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self.seen:
                continue
            self.seen[node] = None
            node.register_prehook(lambda _, path=path: self.push("backward", path))
            node.register_hook(lambda *_: self.pop())
            waiting += [n for n, _ in node.next_functions if n is not None]

    @contextmanager
    def __call__(self):
        def before(module, args, kwargs=None):
            if id(module) in self.paths:
                self.own((args, kwargs), self.path)
                self.push("forward", self.paths[id(module)])

        def after(module, args, out):
            if id(module) in self.paths:
                self.own(out, self.paths[id(module)])
                self.pop()

        hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            while self.stack:
                self.pop()
            self.seen.clear()

    @contextmanager
    def during(self, phase: str, path: str = ""):
        self.push(phase, path)
        try:
            yield
        finally:
            self.pop()


def watched_step(target, modules: Modules) -> torch.Tensor | None:
    """target.step() with its phases told to `modules`: what the forward does outside any module belongs to the model itself."""
    def phase(name: str):
        return nullcontext() if name == "forward" else modules.during(name, name if name == "optimizer" else "")

    with modules():
        return target.step(phase)
