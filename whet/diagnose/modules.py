"""Which module is at work: forward by hooks on modules, backward by hooks on the autograd nodes that its forward made."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from whet.workload import tensors_in

Enter = Callable[[str, str], object]  # (phase, path) -> anything with close(), or None


class Modules:
    """While it is on, `path` and `phase` say what is at work; `entering(phase, path)` is called, and what it returns is closed.

    Paths are those of named_modules(); the model itself is "". A node of the autograd graph belongs to the innermost module
    in whose forward it was made.
    """

    def __init__(self, model: nn.Module, entering: Enter = lambda phase, path: None):
        self.modules = {name: m for name, m in model.named_modules()}
        self.entering, self.on = entering, False
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

    def enter(self, path: str, given) -> None:
        self.own(given, self.path)
        self.push("forward", path)

    def leave(self, path: str, out) -> None:
        self.own(out, path)
        self.pop()

    def hook(self, module: nn.Module, path: str) -> Iterator:
        """Hooks on one module. torch.compile traces hooks: there they do nothing, so a compiled part stays one piece."""
        def before(module, args, kwargs):
            if not torch.compiler.is_compiling():
                self.enter(path, (args, kwargs))

        def after(module, args, out):
            if not torch.compiler.is_compiling():
                self.leave(path, out)

        yield module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove
        yield module.register_forward_hook(after, prepend=True, always_call=True).remove

    def surround(self, module: nn.Module, path: str) -> Callable[[], None]:
        """A module of module.compile() has its hooks inside what is compiled: its compiled call is marked from outside."""
        compiled = module._compiled_call_impl
        assert compiled is not None

        def call(*args, **kwargs):
            self.enter(path, (args, kwargs))
            out = None
            try:
                out = compiled(*args, **kwargs)
                return out
            finally:
                self.leave(path, out)

        module._compiled_call_impl = call  # type: ignore[assignment]
        return lambda: setattr(module, "_compiled_call_impl", compiled)

    @contextmanager
    def attached(self):
        """Hooks on every module, for a step whose own time is taken and must not have the hooking in it."""
        with ExitStack() as stack:
            for path, module in self.modules.items():
                if getattr(module, "_compiled_call_impl", None) is not None:
                    stack.callback(self.surround(module, path))
                else:
                    for remove in self.hook(module, path):
                        stack.callback(remove)
            self.on = True
            stack.callback(lambda: setattr(self, "on", False))
            yield

    @contextmanager
    def __call__(self):
        with nullcontext() if self.on else self.attached():
            try:
                yield self
            finally:
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
    """target.step() with its phases pushed onto `modules`; what the forward does outside any module is the model's own."""
    def phase(name: str):
        return nullcontext() if name == "forward" else modules.during(name, name if name == "optimizer" else "")

    with modules():
        return target.step(phase)
