"""Which impl serves which call. Models are handed a Choices and ask it for every op: `ops.rms_norm(x, w, eps)`."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from whet.op import Call, Op, discover, error


class Choices:
    """A table from call to impl name. What is not in the table gets `default`, or the op's stock impl.

    table    {call key: impl name}, as the tuner writes it; sizes that vary are bucketed
    default  impl name for calls not in the table; None: the op's best stock call
    """

    def __init__(self, table: Mapping[str, str] | None = None, default: str | None = None):
        self.table = dict(table or {})
        self.default = default

    def __getattr__(self, name: str) -> "Chosen":
        if name.startswith("_"):
            raise AttributeError(name)
        ops = discover()
        if name not in ops:
            raise AttributeError(f"no op named {name!r}; there are {', '.join(ops)}")
        chosen = Chosen(ops[name], self)
        self.__dict__[name] = chosen  # next time no __getattr__
        return chosen

    def pick(self, op: Op, call: Call) -> str:
        """The impl for a call: its own entry, else its bucket's, else the default."""
        found = self.table.get(call.key) or self.table.get(call.bucketed(op).key) or self.default or op.stock
        return found if found in op.impls else op.stock

    def __repr__(self):
        return f"Choices({len(self.table)} calls tuned, default {self.default or 'stock'})"


class Chosen:
    """One op through one Choices. The first call of a shape looks the impl up and checks the arguments; later ones do not."""

    def __init__(self, op: Op, choices: Choices):
        self.op, self.choices = op, choices
        self.fast: dict[tuple, object] = {}

    def __call__(self, *args, **options):
        if torch.compiler.is_compiling():
            return self.resolve(args, options)(*args, **options)
        key = [torch.is_grad_enabled()]
        for a in args:
            if isinstance(a, torch.Tensor):
                key += (a.shape, a.dtype, a.device, a.requires_grad)
            elif a.__class__ is not float:
                key.append(a)
        if options:
            for k, a in options.items():
                key += (k, a.shape, a.dtype, a.device, a.requires_grad) if isinstance(a, torch.Tensor) else (k, a)
        run = self.fast.get(tuple(key))
        if run is None:
            run = self.fast[tuple(key)] = self.resolve(args, options)
        return run(*args, **options)

    def resolve(self, args, options):
        bound = self.op.bind(args, options)
        if reason := self.op.check(**bound):
            raise error(self.op.name, "auto", reason)
        name = self.choices.pick(self.op, self.op.call(bound))
        for fallback in (self.op.stock, "eager"):  # a choice tuned for another layout or device gives way, never fails
            if self.op.why_not(name, bound) is None:
                break
            name = fallback
        return self.op.impls[name].run


class Recorder(Choices):
    """Runs every call on its stock impl and counts the distinct ones: the recording pass."""

    def __init__(self, default: str | None = None):
        super().__init__(default=default)
        self.calls: dict[str, tuple[Call, int]] = {}

    def pick(self, op: Op, call: Call) -> str:
        count = self.calls.get(call.key, (call, 0))[1]
        self.calls[call.key] = (call, count + 1)
        return super().pick(op, call)

    def __getattr__(self, name: str):
        chosen = super().__getattr__(name)
        chosen.fast = Forgetful()
        return chosen


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


_active: list[Choices] = []


def current() -> Choices:
    """What impl="auto" asks: the innermost `use(...)`, else this machine's entries of ./whet.lock, else stock."""
    if not _active:
        from whet.lock import Lock

        _active.append(Choices(Lock.read().table()))
    return _active[-1]


@contextlib.contextmanager
def use(choices: Choices) -> Iterator[Choices]:
    """Within the block, impl="auto" asks these choices."""
    _active.append(choices)
    try:
        yield choices
    finally:
        _active.remove(choices)


def public(op: Op):
    """The documented function of an op: the reference's arguments, plus impl."""

    def function(*args, impl: str = "auto", **options):
        if impl == "auto":
            return getattr(current(), op.name)(*args, **options)
        run = op.impl(impl).run
        bound = op.bind(args, options)
        if reason := op.why_not(impl, bound):
            raise error(op.name, impl, reason)
        return run(*args, **options)

    import inspect

    parameters = [*op.signature.parameters.values(), inspect.Parameter("impl", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str)]
    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = f"{op.reference.__doc__}\n\nimpl: 'auto' (chosen by measurement, else stock) or one of {', '.join(op.impls)}."
    function.__signature__ = op.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.op = op  # type: ignore[attr-defined]
    return function
