"""What Gluon's kernels compute with, on the CPU: scalars and tiles as torch tensors, pointers, descriptors, shared memory."""

import functools
import types

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from whet.interpret_gluon.engines import Barrier, Engines, Hazard, PendingProduct, SharedTile

SMALL = (torch.float16, torch.bfloat16)


class Value:
    """A scalar or a tile in registers."""

    __slots__ = ("t",)

    def __init__(self, t: torch.Tensor):
        self.t = t

    @property
    def dtype(self) -> torch.dtype:
        return self.t.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.t.shape)

    def __getitem__(self, at) -> "Value":
        return Value(self.t[at])

    def __bool__(self) -> bool:
        return bool(self.t)

    def __index__(self) -> int:
        return int(self.t)

    __int__ = __index__

    def __neg__(self) -> "Value":
        return Value(-self.t)

    def __invert__(self) -> "Value":
        return Value(~self.t)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.t.view(dtype) if bitcast else self.t.to(dtype))


class Pointer:
    """Addresses of a tensor's elements, its own storage from its first element on."""

    def __init__(self, flat: torch.Tensor, offset: torch.Tensor):
        self.flat, self.offset = flat, offset

    @classmethod
    def to(cls, x: torch.Tensor) -> "Pointer":
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(torch.as_strided(x.detach(), (size,), (1,), x.storage_offset()), torch.zeros((), dtype=torch.int64))

    def __add__(self, offset) -> "Pointer":
        return Pointer(self.flat, self.offset + tensor(offset).to(torch.int64))

    __radd__ = __add__

    def reached(self, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets, and whether each is asked for; one that is and lies outside is a fault."""
        active = torch.ones((), dtype=torch.bool) if mask is None else tensor(mask)
        at, active = torch.broadcast_tensors(self.offset, active)
        if bool((active & ((at < 0) | (at >= len(self.flat)))).any()):
            raise Hazard(f"memory outside a tensor of {len(self.flat):,} elements is read or written")
        return torch.where(active, at, 0), active


class Descriptor:
    """A host's TensorDescriptor as a kernel sees it."""

    def __init__(self, host: TensorDescriptor):
        self.host, self.layout, self.block_shape = host, host.layout, list(host.block_shape)
        self.dtype, self.shape = host.base.dtype, host.shape
        count = functools.reduce(lambda a, b: a * b, self.block_shape)
        self.block_type = types.SimpleNamespace(nbytes=count * host.base.element_size(), shape=self.block_shape)
        flat = Pointer.to(host.base).flat
        self.whole = torch.as_strided(flat, tuple(host.shape), tuple(host.strides), flat.storage_offset())

    def part(self, coord) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The block at coord: where it lies in the tensor and where that is in the block; past the end there is none."""
        first = [int(c) for c in coord]
        if len(first) != len(self.block_shape):
            raise Hazard(f"a copy has {len(first)} coordinates, its descriptor {len(self.block_shape)}")
        lo = [max(0, c) for c in first]
        hi = [max(a, min(c + b, n)) for a, c, b, n in zip(lo, first, self.block_shape, self.host.shape)]
        there = tuple(slice(min(a, n), min(b, n)) for a, b, n in zip(lo, hi, self.host.shape))
        return there, tuple(slice(s.start - c, s.stop - c) if s.stop > s.start else slice(0, 0) for s, c in zip(there, first))

    def read(self, coord) -> torch.Tensor:
        there, here = self.part(coord)
        block = torch.zeros(self.block_shape, dtype=self.dtype)
        block[here] = self.whole[there]
        return block

    def write(self, coord, block: torch.Tensor) -> None:
        there, here = self.part(coord)
        self.whole[there] = block[here]


class Shared:
    """What allocate_shared_memory gives, and views of it."""

    def __init__(self, engines: Engines, tile: SharedTile):
        self.engines, self.tile = engines, tile

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tile.threads.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tile.threads.dtype

    def of(self, view) -> "Shared":
        return Shared(self.engines, self.tile.of(view))

    def index(self, i) -> "Shared":
        if not 0 <= int(i) < self.shape[0]:
            raise Hazard(f"shared memory of {self.shape[0]} tiles has no tile {int(i)}")
        return self.of(lambda t: t[int(i)])

    def reshape(self, shape) -> "Shared":
        return self.of(lambda t: t.view([int(n) for n in shape]))

    def permute(self, order) -> "Shared":
        return self.of(lambda t: t.permute([int(n) for n in order]))

    def slice(self, start, length, dim=0) -> "Shared":
        return self.of(lambda t: t.narrow(int(dim), int(start), int(length)))

    def store(self, value: Value) -> None:
        self.engines.pause()
        if value.dtype != self.dtype or value.shape != self.shape:
            raise Hazard(f"a tile {self.shape} of {self.dtype} is stored from {value.shape} of {value.dtype}")
        self.tile.threads.copy_(value.t)
        self.engines.current.unfenced.append(self.tile)

    def load(self, layout=None) -> Value:
        self.engines.pause()
        return Value(self.tile.threads.clone())


class Barriers:
    """Shared memory that holds mbarriers."""

    def __init__(self, barriers: list[Barrier]):
        self.barriers = barriers

    def index(self, i) -> "Barriers":
        if not 0 <= int(i) < len(self.barriers):
            raise Hazard(f"there are {len(self.barriers)} mbarriers, and none of number {int(i)}")
        return Barriers([self.barriers[int(i)]])

    @property
    def one(self) -> Barrier:
        return self.barriers[0]


def tensor(x) -> torch.Tensor:
    """A kernel's scalar or tile as a tensor: a number is of 32 bits where it fits, as in Triton."""
    if isinstance(x, Value):
        return x.t
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, int):
        return torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float32)
    if isinstance(x, PendingProduct):
        return x.value
    raise TypeError(f"{type(x).__name__} is no scalar or tile")


def together(a, b) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the type that Triton computes in: a number takes a float tile's, else the wider of both counts."""
    x, y = tensor(a), tensor(b)
    if not isinstance(a, Value) and x.is_floating_point() >= y.is_floating_point() and y.is_floating_point():
        return x.to(y.dtype), y
    if not isinstance(b, Value) and y.is_floating_point() <= x.is_floating_point() and x.is_floating_point():
        return x, y.to(x.dtype)
    wide = torch.float32 if {x.dtype, y.dtype} == set(SMALL) else torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


def divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


def quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = (t if t.is_floating_point() else t.to(torch.float32) for t in (x, y))
    return x / y


OPERATORS = dict(
    add=torch.add, sub=torch.sub, mul=torch.mul, truediv=quotient, floordiv=divided, mod=torch.fmod, lt=torch.lt, le=torch.le,
    gt=torch.gt, ge=torch.ge, eq=torch.eq, ne=torch.ne, xor=torch.bitwise_xor, lshift=torch.bitwise_left_shift,
    rshift=torch.bitwise_right_shift, **{"and": torch.bitwise_and, "or": torch.bitwise_or},
)


def operator(compute, swapped: bool):
    def apply(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        x, y = together(other, self) if swapped else together(self, other)
        return Value(compute(x, y))

    return apply


for _name, _compute in OPERATORS.items():
    setattr(Value, f"__{_name}__", operator(_compute, False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", operator(_compute, True))
Value.__hash__ = None  # type: ignore[assignment]
