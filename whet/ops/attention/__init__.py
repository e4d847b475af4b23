"""attention: softmax(scale * q k^T) v, causal or within a window, with grouped heads, any strides, and FP8."""

from whet.op import Op
from whet.ops.attention import meaning
from whet.ops.attention.launch import IMPLS
from whet.ops.attention.pieces import pieces
from whet.ops.attention.stock import STOCK
from whet.values import changed, families

OP = Op(
    name="attention",
    reference=meaning.reference,
    inputs=meaning.inputs,
    case_of=meaning.case_of,
    check=meaning.check,
    cases=meaning.CASES,
    shapes=meaning.SHAPES,
    cost=meaning.cost,
    grads=("q", "k", "v"),
    impls=STOCK | IMPLS,
    # Lengths are not rounded up: that would make other spans, since which queries see what hangs on both of them exactly.
    dynamic=("B",),
    tiny=dict(B=1, H=2, KV=1, Lq=300, Lk=300),  # one key head, so that any number of query heads is a multiple of it
    proof=meaning.proof,
    smaller=meaning.smaller,
    # Scores stay where a softmax has more than one weight: beyond, the gradient is what is left of a difference of equals.
    hostile=families(
        ("q", "k", "v"), limit=2.0, shifted=("k",), offset=5.0, tails=("v",), tied=("k", "v"),
        sharp_weights=changed(("q",), lambda q: 4 * q), overflowing_scores=changed(("k",), lambda k: k + 60),
    ),
    pieces=pieces,
    kinds=meaning.KINDS,
)
