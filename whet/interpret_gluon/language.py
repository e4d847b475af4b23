"""Gluon's kernels for Hopper on the CPU: the language over torch tensors, the engines by `engines`.

Triton's interpreter knows no Gluon. Here a kernel's own Python runs, with `gl` and what stands beside it replaced. Each launch
of a kernel is interleaved in another way, so what depends on luck gives other bits from one call to the next, or a `Hazard`.
Layouts are not looked at: the compiler does that.
"""

import collections
import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from whet.interpret_gluon.engines import EXTREMES, Barrier, Engines, Hazard, Interleaving, PendingProduct, Program, SharedTile
from whet.interpret_gluon.values import Barriers, Descriptor, Pointer, Shared, Value, divided, tensor, together

DTYPES = dict(
    float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16, int64=torch.int64, int32=torch.int32,
    int16=torch.int16, int8=torch.int8, uint8=torch.uint8, int1=torch.bool,
)


def interleavings() -> Iterator[Interleaving]:
    yield from (Interleaving(kind) for kind in EXTREMES)
    yield from (Interleaving("random", seed, resident=3) for seed in itertools.count())


class Launches:
    """Under what each launch of a kernel runs: the next of `interleavings`, or what a test sets."""

    def __init__(self) -> None:
        self.fixed: Interleaving | None = None
        self.following: dict[Any, Iterator[Interleaving]] = collections.defaultdict(interleavings)

    def next(self, kernel: Any) -> Interleaving:
        return next(self.following[kernel]) if self.fixed is None else replace(self.fixed)


LAUNCHES = Launches()


class Language:
    """`gl` within a launch."""

    constexpr = gl.constexpr
    static_range = staticmethod(range)

    def __init__(self, engines: Engines, grid: tuple[int, ...]):
        self.engines, self.grid = engines, grid

    def __getattr__(self, name: str) -> Any:
        if name in DTYPES:
            return DTYPES[name]
        if isinstance(real := getattr(gl, name), type):
            return real  # a layout
        raise NotImplementedError(f"whet's interpreter of Gluon has no gl.{name}")

    def program_id(self, axis: int) -> Value:
        return Value(tensor(self.engines.current.program.place[axis]))

    def num_programs(self, axis: int) -> Value:
        return Value(tensor(self.grid[axis]))

    def full(self, shape, value, dtype, layout=None) -> Value:
        return Value(torch.full([int(n) for n in shape], tensor(value).item(), dtype=dtype))

    def arange(self, start, end, layout=None) -> Value:
        return Value(torch.arange(int(start), int(end), dtype=torch.int32))

    def where(self, condition, a, b) -> Value:
        return Value(torch.where(tensor(condition), *together(a, b)))

    def minimum(self, a, b) -> Value:
        return Value(torch.minimum(*together(a, b)))

    def maximum(self, a, b) -> Value:
        return Value(torch.fmax(*together(a, b)))

    def cdiv(self, a, b) -> Value:
        x, y = together(a, b)
        return Value(divided(x + y - 1, y))

    def max(self, x, axis) -> Value:
        return Value(tensor(x).amax(axis))

    def sum(self, x, axis) -> Value:
        return Value(tensor(x).sum(axis, dtype=x.dtype))

    def exp2(self, x) -> Value:
        return Value(torch.exp2(tensor(x)))

    def log2(self, x) -> Value:
        return Value(torch.log2(tensor(x)))

    def convert_layout(self, x, layout) -> Value:
        return Value(tensor(x))

    def load(self, pointer: Pointer, mask=None, other=None) -> Value:
        at, active = pointer.reached(mask)
        found = pointer.flat[at].clone()  # an index of one element gives a view
        return Value(found if other is None else torch.where(active, found, tensor(other).to(found.dtype)))

    def store(self, pointer: Pointer, value, mask=None) -> None:
        at, active = pointer.reached(mask)
        pointer.flat[at[active]] = tensor(value).to(pointer.flat.dtype).broadcast_to(at.shape)[active]

    def atomic_add(self, pointer: Pointer, value, mask=None, sem=None, scope=None) -> Value:
        self.engines.poll()
        at, active = pointer.reached(mask)
        before, added = pointer.flat[at].clone(), tensor(value).to(pointer.flat.dtype).broadcast_to(at.shape)
        pointer.flat.index_put_((at[active],), added[active], accumulate=True)
        return Value(before)

    def atomic_xchg(self, pointer: Pointer, value, mask=None, sem=None, scope=None) -> Value:
        self.engines.pause()
        before = self.load(pointer, mask)
        self.store(pointer, value, mask)
        return before

    def debug_barrier(self) -> None:
        """Within one function's warps all is in order here."""

    thread_barrier = barrier = debug_barrier

    def allocate_shared_memory(self, dtype, shape, layout=None, value=None):
        if isinstance(layout, hopper.mbarrier.MBarrierLayout):
            return Barriers([Barrier() for _ in range(int(shape[0]))])
        found = Shared(self.engines, SharedTile.empty(shape, dtype))
        if value is not None:
            found.store(value)
        return found

    def warp_specialize(self, functions, warps, registers=None) -> None:
        if len(warps) != len(functions) - 1:
            raise ValueError(f"warp_specialize needs a count of warps for each function but the first, got {warps}")
        self.engines.specialize([functools.partial(run, *args) for run, args in functions])


class Hopper:
    """What stands beside `gl`: barriers, copies, products, the fence."""

    def __init__(self, engines: Engines):
        self.engines = engines
        self.mbarrier = types.SimpleNamespace(
            MBarrierLayout=hopper.mbarrier.MBarrierLayout, init=self.init, invalidate=self.invalidate, expect=self.expect,
            arrive=self.arrive, wait=self.wait,
        )
        self.tma = types.SimpleNamespace(
            async_copy_global_to_shared=self.bring, async_copy_shared_to_global=self.take, store_wait=self.store_wait,
        )

    def init(self, barrier: Barriers, count) -> None:
        barrier.one.init(int(count))

    def invalidate(self, barrier: Barriers) -> None:
        barrier.one.check()
        barrier.one.alive = False

    def expect(self, barrier: Barriers, size, pred=True) -> None:
        self.engines.pause()
        if pred:
            barrier.one.arrive(1, int(size))

    def arrive(self, barrier: Barriers, count=1, pred=True) -> None:
        self.engines.pause()
        if pred:
            barrier.one.arrive(int(count))

    def wait(self, barrier: Barriers, phase, pred=True, deps=()) -> None:
        if pred:
            parity = int(phase)
            self.engines.pause(lambda: barrier.one.passed(parity), barrier.one)

    def bring(self, descriptor: Descriptor, coord, barrier: Barriers, result: Shared, pred=True) -> None:
        self.engines.pause()
        if not pred:
            return
        if result.tile.nbytes != descriptor.block_type.nbytes:
            raise Hazard(f"a block of {descriptor.block_type.nbytes} bytes is copied to {result.tile.nbytes} of shared memory")
        place, tile = [int(c) for c in coord], result.tile

        def run() -> None:
            block = descriptor.read(place).view(tile.threads.shape)
            tile.threads.copy_(block)
            tile.engines.copy_(block)
            barrier.one.arrived(tile.nbytes)

        self.engines.copy(barrier.one, run)

    def take(self, descriptor: Descriptor, coord, source: Shared) -> None:
        self.engines.pause()
        place, tile = [int(c) for c in coord], source.tile
        self.engines.store(lambda: descriptor.write(place, tile.engines.reshape(descriptor.block_shape)))

    def store_wait(self, pendings) -> None:
        self.engines.idle()
        self.engines.current.stored(int(pendings))

    def fence_async_shared(self, cluster=False) -> None:
        self.engines.pause()
        for tile in self.engines.current.unfenced:
            tile.engines.copy_(tile.threads)
        self.engines.current.unfenced.clear()

    def warpgroup_mma(self, a, b: Shared, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
        self.engines.pause()
        adds = bool(use_acc)

        def run() -> torch.Tensor:
            left = a.tile.engines if isinstance(a, Shared) else tensor(a)
            out = left.to(torch.float32) @ b.tile.engines.to(torch.float32)
            before = tensor(acc)
            if out.shape != before.shape:
                raise Hazard(f"a product of {tuple(out.shape)} is added to {tuple(before.shape)}")
            return out + before if adds else out

        product = PendingProduct(run)
        self.engines.product(product)
        return product if is_async else self.warpgroup_mma_wait(0, [product])

    def warpgroup_mma_init(self, value: Value) -> PendingProduct:
        return PendingProduct(made=value.t)

    def warpgroup_mma_wait(self, num_outstanding=0, deps=()):
        self.engines.idle()
        self.engines.current.drain(int(num_outstanding))
        left = self.engines.current.products
        if any(d is p for d in deps for p in left):
            raise Hazard(f"a product is read that may be one of the {int(num_outstanding)} which are not waited for")
        found = tuple(Value(d.value) if isinstance(d, PendingProduct) else d for d in deps)
        return found[0] if len(found) == 1 else found


def loop(*bounds) -> Iterator[Value]:
    yield from (Value(tensor(i)) for i in range(*(int(b) for b in bounds)))


class GluonLaunch:
    """One launch of a kernel: its functions with the language of this launch in place of Gluon's."""

    def __init__(self, grid: tuple[int, int, int], schedule: Interleaving):
        self.grid, self.engines = grid, Engines(schedule)
        self.functions: dict[Any, types.FunctionType] = {}
        language, beside = Language(self.engines, grid), Hopper(self.engines)
        self.replaced: dict[int, Any] = {id(gl): language, id(tl): language}
        for name in ("mbarrier", "tma", "fence_async_shared", "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait"):
            self.replaced[id(getattr(hopper, name))] = getattr(beside, name)

    def replace(self, x: Any) -> Any:
        if id(x) in self.replaced:
            return self.replaced[id(x)]
        if isinstance(x, tl.constexpr):
            return x.value
        return self.function(x.fn) if hasattr(x, "fn") and hasattr(x, "arg_names") else x

    def function(self, fn: types.FunctionType) -> types.FunctionType:
        if fn not in self.functions:
            scope: dict[str, Any] = dict(range=loop)
            self.functions[fn] = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
            scope.update((name, self.replace(fn.__globals__[name])) for name in fn.__code__.co_names if name in fn.__globals__)
        return self.functions[fn]

    def argument(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer.to(x)
        if isinstance(x, TensorDescriptor):
            return Descriptor(x)
        return x if isinstance(x, bool) or not isinstance(x, (int, float)) else Value(tensor(x))

    def run(self, fn: types.FunctionType, given: dict[str, Any]) -> None:
        body, inference = self.function(fn), torch.is_inference_mode_enabled()

        def program() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                body(**given)

        X, Y, Z = self.grid
        places = [(x, y, z) for z in range(Z) for y in range(Y) for x in range(X)]
        together = self.engines.schedule.resident
        for start in range(0, len(places), together):
            self.engines.run([(Program(place), program) for place in places[start : start + together]])


class Interpreted:
    """A Gluon kernel that runs on the CPU: `Interpreted(kernel)[grid](...)`."""

    def __init__(self, kernel: Any):
        self.kernel, self.signature = kernel, inspect.signature(kernel.fn)
        self.constant = {p.name for p in kernel.params if p.is_constexpr}

    def __getitem__(self, grid) -> Any:
        return functools.partial(self.launch, grid)

    def launch(self, grid, *args, **options) -> None:
        named = {name: x for name, x in options.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
        launch = GluonLaunch((x, y, z), LAUNCHES.next(self.kernel.fn))
        given = {name: x if name in self.constant else launch.argument(x) for name, x in bound.arguments.items()}
        launch.run(self.kernel.fn, given)
