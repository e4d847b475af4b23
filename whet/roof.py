"""The roofs of the roofline: what this machine reaches at best, and the cache that keeps it. `measure` takes the times."""

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from whet import machine
from whet.op import Cost


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at best, measured: the roofs of the roofline."""

    copy_gbs: float  # device-to-device copy, bytes read plus bytes written
    tflops: dict[str, float]  # dtype name -> square matmul rate
    busy: str = ""  # what else the machine was doing; such ceilings are too low, and are used once and not kept

    def floor_ms(self, cost: Cost, backward: bool, dtype: str) -> float:
        """The time below which no impl can go."""
        return max(self._parts(cost, backward, dtype)) * 1e3

    def bound(self, cost: Cost, backward: bool, dtype: str) -> str:
        memory, compute = self._parts(cost, backward, dtype)
        return "memory" if memory >= compute else "compute"

    def _parts(self, cost: Cost, backward: bool, dtype: str) -> tuple[float, float]:
        """Seconds to move the bytes, seconds to do the flops; a dtype whose rate was not measured goes at float32's."""
        def at(named: str) -> float:
            rate, own = (self.tflops.get(d, self.tflops["float32"]) for d in (named or dtype, dtype))
            return rate if cost.products == 1 else max(rate / cost.products, own)

        rate, bwd_rate = at(cost.dtype), at(cost.bwd_dtype)
        compute = cost.flops / rate + (cost.bwd_flops / bwd_rate if backward else 0.0)
        return cost.of(backward)[0] / (self.copy_gbs * 1e9), compute / 1e12


def ceilings_path() -> Path:
    return machine.cache_dir() / f"ceilings-{re.sub(r'[^A-Za-z0-9.+]+', '-', machine.this_machine().key)}.json"


def known_ceilings() -> Ceilings | None:
    """Those that were measured before, on this machine with these versions. Never measures."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = Ceilings(**json.loads(ceilings_path().read_text()))
        if not known.busy and all(rate > 0 for rate in (known.copy_gbs, known.tflops["float32"], *known.tflops.values())):
            return known
    return None


def keep_ceilings(found: Ceilings) -> None:
    with contextlib.suppress(OSError):  # a read-only home costs the cache, not the run
        path = ceilings_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found)))
