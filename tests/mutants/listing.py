"""The list of mutants: single faults in whet's own kernels, one TOML file for each op, as small patches of whet/.

A file gives the defaults of its mutants (op, file, impl, grad, case, gpu_case, dtype), and each mutant what differs.
"""

from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings it there
    import tomli as tomllib  # type: ignore[no-redef]

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "whet"
KINDS = {
    "scale": "values too large or too small by a factor",
    "eps": "eps dropped, in the wrong place or of another size",
    "term-missing": "a gradient without one of its terms",
    "reduction": "a sum over too few or too many elements, or divided by the wrong count",
    "mask": "an edge off by one, or a padded element that counts",
    "stride": "the strides of one tensor taken for those of another",
    "upstream-gradient": "an upstream gradient that is ignored, overwritten or misread",
    "frozen-argument": "wrong where an argument needs no gradient",
    "output-alone": "wrong where only one of several outputs is used",
    "in-place": "an argument is changed",
    "overflow": "infinite or NaN at large values",
    "cancellation": "digits lost at a large common offset",
    "clipped": "outliers are cut off",
    "sign": "wrong for values or weights of one sign",
    "tie": "wrong among equal values",
    "non-finite": "an infinity or a NaN is handled wrongly",
    "stale-buffer": "what an earlier call left is read or given out",
    "neighbour-size": "right at the bucket's size, wrong at a size beside it",
    "rounding": "precision lost inside",
    "option": "an option is ignored or misread",
    "position": "positions off by one, or past some place",
    "heads": "a query head reads another's keys, or counts twice",
    "quantised": "stored weights are widened wrongly",
    "global-state": "grad mode, random numbers or flags are changed",
    "index-overflow": "an index past 2^31 in 32 bits",
    "hang": "it never ends, or gives up waiting",
    "synchronisation": "a wait, a fence or an arrival that is missing, too early or in another phase",
}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    old, new   the text in `file` (relative to whet/) that is replaced, where it occurs exactly once
    case       the call that the tuner would meet, small enough for Triton's interpreter
    gpu_case   the same at a size as in real use
    sample     a smaller case still, for the mutants that the test-suite tries
    needs      "gpu" or "interpreter" where the code runs on one of them alone
    target     "sm_90" where launchers are to choose as on that GPU, which their kernels in Gluon are interpreted for
    path       "persistent" for the decode kernel, which no op runs
    dtype      where the kernel takes one alone: that of the call, whatever the run's is
    """

    op: str
    name: str
    kind: str
    file: str
    old: str
    new: str
    case: dict = field(default_factory=dict)
    impl: str = "triton"
    grad: bool = True
    gpu_case: dict = field(default_factory=dict)
    sample: dict = field(default_factory=dict)
    needs: str = ""
    target: str = ""
    path: str = ""
    dtype: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}: {self.name}"

    def patched(self, package: Path = PACKAGE) -> str:
        """The text of the mutated file."""
        text = (package / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its text must occur once in {self.file}, found {found} times")
        return text.replace(self.old, self.new)


def read(path: Path) -> list[Mutant]:
    told = tomllib.loads(path.read_text())
    mutants = told.pop("mutant")
    return [Mutant(**(told | m)) for m in mutants]


def read_all(folder: Path = HERE) -> list[Mutant]:
    return [m for path in sorted(folder.glob("*.toml")) for m in read(path)]
