"""Which candidate serves which call. Models are handed a Choices and ask it for every op: `ops.rms_norm(x, w, eps)`."""

import ast
import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch

from whet.op import Call, Impl, Op, autocast_of, base, discover


class Choices:
    """A table from call to candidate: an impl, or one with its tile. What is not in it gets `default`, or the stock impl.

    table    {call key: candidate}, as the tuner writes it; sizes that vary are bucketed
    default  candidate for calls not in the table; None: the op's best stock call
    evidence {call key: what was measured of it}, as `evidence_of` finds it; printing the choices shows it
    """

    def __init__(
        self, table: Mapping[str, str] | None = None, default: str | None = None, evidence: Mapping[str, dict] | None = None
    ):
        known = dict.fromkeys(name for op in discover().values() for name in op.impls)
        if default is not None and base(default) not in known:
            raise ValueError(f"Choices: default must be None or an impl of some op, one of {list(known)}, got {default!r}")
        self.table = dict(table or {})
        self.default = default
        self.evidence = dict(evidence or {})

        for name, op in discover().items():
            setattr(self, name, chosen(op, self))

    def __getattr__(self, name: str) -> Callable:
        raise AttributeError(f"no op named {name!r}; there are {', '.join(discover())}")

    def pick(self, op: Op, call: Call) -> str:
        """The candidate for a call: its own entry, else its bucket's, else the default."""
        found = self.table.get(call.key) or self.table.get(call.bucketed(op).key) or self.default or op.stock
        return found if base(found) in op.impls else op.stock

    def measured(self, name: str, *args, **options) -> bool:
        """Whether what serves this call was measured for it or for its bucket; True where nothing was measured at all."""
        if not self.table or self.default is not None:
            return True
        op = discover()[name]
        call = op.call(op.plain(op.bind(args, options)))
        return call.key in self.table or call.bucketed(op).key in self.table

    def _memory(self) -> dict:
        return {}

    def __repr__(self):
        return f"Choices({len(self.table)} calls tuned, default {self.default or 'stock'})"

    def __str__(self):
        """A line for each tuned call: what serves it, its time, and how much longer eager and the best other take."""
        lines = [("op", "call", "impl", "ms", "versus")]
        for key, impl in self.table.items():
            known = self.evidence.get(key, {})
            others = {known.get("rival"): known.get("vs_rival")} | {"eager": known.get("vs_eager")}
            versus = ", ".join(f"{over:.2f}x {name}" for name, over in others.items() if over and name != impl)
            ms = f"{known['ms']:.4f}" if known.get("ms") else "-"
            op, _, call = key.partition(" ")
            lines.append((op, call, impl, ms, versus or "-"))
        if len(lines) == 1:
            return repr(self)
        widths = [max(map(len, column)) for column in zip(*lines)]
        rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
        return "\n".join([repr(self), *rows])


def evidence_of(entries: Mapping[str, dict], mode: str, table: Mapping[str, str]) -> dict[str, dict]:
    """{call key: time, and the ratios to eager and to the best other} of these choices, from a lock's entries."""
    found = {key: entries.get(f"{key} @ {mode}", {}) for key in table}
    facts = ("ms", "vs_eager", "rival", "vs_rival")
    return {k: {f: e[f] for f in facts if f in e} for k, e in found.items() if e.get("chosen") == table[k]}


_made = itertools.count()


def chosen(op: Op, choices: Choices | None) -> Callable:
    """One op through one Choices, or through those that are current, as a function written out for the op's own arguments.

    The first call of a shape looks the impl up and checks the arguments; later ones cost one dictionary look-up. The
    key is spelled out per argument rather than looped over: records/dispatch-rms-norm-16384x1024.json has what a call costs so,
    `dispatch_us`, and looped over, `dispatch_plain_us`; an op of more arguments saves more.
    """
    parameters = op.signature.parameters
    absent = {name: op.unavailable(name) for name in op.impls}
    mark = str(next(_made))  # a guard of torch.compile's: other Choices, another graph

    def pick(mark: str, case: str, dtype: str, grad: bool) -> str:
        return (current() if choices is None else choices).pick(op, Call(op.name, ast.literal_eval(case), dtype, grad))

    # As torch.compiler.assume_constant_result marks it, less its import of dynamo: asked while tracing, baked into the graph.
    pick._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def resolve(*args):
        given = dict(zip(parameters, args))
        bound = given if torch.compiler.is_compiling() else op.plain(given)
        if reason := op.unfit(bound):
            raise error(op.name, "auto", reason)
        call = op.call(bound)
        picked = pick(mark, call.text, call.dtype, call.grad)
        why: dict[str, str] = {}
        # A choice tuned for another layout or device, or a tile of another version, gives way; it never fails.
        for name in (base(picked), op.stock, "eager", *op.impls):
            if name in why:
                continue
            if reason := absent[name] or op.refused(name, bound):
                why[name] = reason
                continue
            name = picked if name == base(picked) and not op.unknown_tile(picked, bound) else name
            return op.run(name) if bound is given or all(bound[k] is v for k, v in given.items()) else plainly(op, name)
        reasons = "; ".join(f"{name}: {why[name]}" for name in op.impls)
        raise error(op.name, "auto", f"no impl takes these arguments ({reasons})")

    scope = dict(
        defaults={n: p.default for n, p in parameters.items()}, Tensor=torch.Tensor,
        fast={} if choices is None else choices._memory(), grad_enabled=torch.is_grad_enabled,
        dynamo_compiling=torch.compiler.is_dynamo_compiling, compiler=torch.compiler,
        resolve=resolve, refused=functools.partial(refusal, resolve),
        any_autocast=torch._C._is_any_autocast_enabled, autocast_of=autocast_of,
    )
    exec(_written_out(op), scope)
    return cast(Callable, scope[op.name])


def refusal(resolve: Callable, *args) -> ValueError | None:
    """What is wrong with the arguments of a call that failed, or None where they are not what is wrong."""
    try:
        resolve(*args)
    except ValueError as reason:
        return reason
    return None


def error(op: str, impl: str, reason: str) -> ValueError:
    return ValueError(f"{op}[{impl}]: {reason}")


def plainly(op: Op, name: str) -> Callable:
    """A candidate for calls with numbers that are not Python's own."""
    run, names = op.run(name), tuple(op.signature.parameters)
    return lambda *args: run(**op.plain(dict(zip(names, args))))


def required(p: inspect.Parameter) -> bool:
    return p.default is p.empty


def _written_out(op: Op) -> str:
    """The source of `chosen`'s function. fast is emptied when an option that never repeats, such as a position, fills it.

    The key holds what the checks ask of an argument, its class too: 1, True and numpy's 1.0 are equal. An error of a call
    that was not checked anew is the arguments' if they are of a wrong kind: the key does not hold a sparse tensor's strides.
    """
    first = next(iter(op.signature.parameters))
    key, given = ["grad_enabled()", f"{first}.device", f"any_autocast() and autocast_of({first})"], []
    for name, p in op.signature.parameters.items():
        where = "" if name == first else f"{name}.device, "
        facts = f"{name}.__class__, {where}{name}.shape, {name}.stride(), {name}.dtype, {name}.requires_grad"
        key.append(facts if required(p) else f"({facts}) if isinstance({name}, Tensor) else ({name}.__class__, {name})")
        given.append(name if required(p) else f"{name}=defaults[{name!r}]")
    names = ", ".join(op.signature.parameters)
    return f"""
def {op.name}({', '.join(given)}):
    if dynamo_compiling() or compiler._is_compiling_flag:  # is_compiling() in half its time
        return resolve({names})({names})
    try:
        key = ({', '.join(key)})
        run = fast.get(key)
    except Exception:  # no tensor, or an option that cannot be a key: checked and refused, or looked up each time
        key = run = None
    if run is None:
        run = resolve({names})
        if len(fast) > 4096:
            fast.clear()
        if key is not None:
            fast[key] = run
    try:
        return run({names})
    except Exception:
        if refusal := refused({names}):
            raise refusal from None
        raise
"""


class Recorder(Choices):
    """Runs every call on its stock impl and counts the distinct ones: the recording pass."""

    def __init__(self, default: str | None = None):
        super().__init__(default=default)
        self.calls: dict[str, tuple[Call, int]] = {}

    def pick(self, op: Op, call: Call) -> str:
        count = self.calls.get(call.key, (call, 0))[1]
        self.calls[call.key] = (call, count + 1)
        return super().pick(op, call)

    def _memory(self) -> dict:
        return Forgetful()


class Forgetful(dict):
    """Remembers nothing, so that every call is counted."""

    def __setitem__(self, key, value):
        pass


_active: list[Choices] = []


def current() -> Choices:
    """What impl="auto" asks: the innermost `use(...)`, else this machine's entries of ./whet.lock, else stock."""
    if not _active:
        from whet.lock import Lock

        lock = Lock.read()
        table = lock.table()
        _active.append(Choices(table, evidence=evidence_of(lock.calls, "eager", table)))
    return _active[-1]


@contextlib.contextmanager
def use(choices: Choices) -> Iterator[Choices]:
    """Within the block, impl="auto" asks these choices."""
    if not isinstance(choices, Choices):
        raise ValueError(f"use: choices must be a Choices, such as Choices(default='eager'), got {choices!r}")
    _active.append(choices)
    try:
        yield choices
    finally:
        _active.remove(choices)


def implied(impl: Impl) -> str:
    """The arguments that naming an impl sets, as a call writes them."""
    return ", ".join(f"{k}={v!r}" for k, v in impl.implies.items())


def public(op: Op):
    """The documented function of an op: the reference's arguments, plus impl."""

    traced = chosen(op, None)
    absent = {name: op.unavailable(name) for name in op.impls}
    names = tuple(op.signature.parameters)
    defaults = {n: p.default for n, p in op.signature.parameters.items() if not required(p)}

    def function(*args, impl: str = "auto", **options):
        if impl == "auto":
            if torch.compiler.is_compiling():
                return traced(*args, **options)
            try:
                return getattr(current(), op.name)(*args, **options)
            except TypeError:
                op.bind(args, options)  # raises, naming the op, if the arguments are what is wrong
                raise
        implies, left = op.impl(impl).implies, names[len(args):]
        options = {k: v for k, v in implies.items() if k in left and k not in options} | options
        run = op.run(impl)
        if torch.compiler.is_compiling():
            if reason := absent[base(impl)] or op.misfits(impl, defaults | dict(zip(names, args)) | options):
                raise error(op.name, impl, reason)
            return run(*args, **options)
        bound = op.plain(op.bind(args, options))
        if reason := op.why_not(impl, bound):
            raise error(op.name, impl, reason)
        return run(**bound)

    impl_option = inspect.Parameter("impl", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str)
    parameters = [*op.signature.parameters.values(), impl_option]
    function.__name__ = function.__qualname__ = op.name
    ways = " ".join([
        f"impl: 'auto' (chosen by measurement, else stock) or one of {', '.join(op.impls)}.",
        *(f"Naming {name} sets {implied(impl)} unless given." for name, impl in op.impls.items() if impl.implies),
    ])
    function.__doc__ = f"{op.reference.__doc__}\n\n{ways}"
    function.__signature__ = op.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.op = op  # type: ignore[attr-defined]
    return function
