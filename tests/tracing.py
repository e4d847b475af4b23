"""What Inductor is handed of the ops whose kernels it may see, traced without a GPU: one line of JSON for each.

A script, since kernels must not be interpreted here: `python tests/tracing.py`. Gradients cannot be recorded on a device that
PyTorch was built without, so whole steps are traced on the CPU with the question for the device answered by yes.
"""

import inspect
import json
import operator

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.fx_passes import reinplace
from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.virtualized import V
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from whet import torch_ops
from whet.op import discover


class Hopper:
    """As much of a driver as Triton asks for to parse a kernel."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


class Captured(Exception):
    """Raised in place of a run."""


def t(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype).requires_grad_()


def steps():
    """A name and a function, for every op that is visible."""
    x, w, res, wide, q, k = t(4, 128, 64), t(64), t(4, 128, 64), t(4, 128, 128), t(2, 4, 32, 16), t(2, 2, 32, 16)
    cos, sin, target = torch.randn(32, 8), torch.randn(32, 8), torch.randint(100, (4, 16))
    logits, mixtures, values = t(4, 16, 100), t(4, 16, 10, 3), t(4, 16, dtype=torch.float32)
    run = {name: op.impls["triton"].run for name, op in discover().items() if "triton" in op.impls}
    yield "rms_norm", lambda: run["rms_norm"](x, w)
    yield "add_rms_norm", lambda: run["add_rms_norm"](x, res, w)
    yield "add_layer_norm", lambda: run["add_layer_norm"](x, res, w, w + 1)
    yield "add_layer_norm no bias", lambda: run["add_layer_norm"](x, res, w)
    yield "layer_norm", lambda: run["layer_norm"](x, w, w + 1)
    yield "layer_norm no bias", lambda: run["layer_norm"](x, w)
    stream, wide_w = t(4, 128, 64, dtype=torch.float32), t(64, dtype=torch.float32)
    yield "rms_norm out_dtype", lambda: run["rms_norm"](stream, wide_w, 1e-6, torch.bfloat16)
    yield "add_layer_norm out_dtype", lambda: run["add_layer_norm"](x, stream, wide_w, wide_w + 1, 1e-6, torch.bfloat16)
    yield "swiglu", lambda: run["swiglu"](x, res)
    yield "swiglu packed", lambda: run["swiglu"](wide)
    yield "geglu", lambda: run["geglu"](x, res)
    yield "geglu packed", lambda: run["geglu"](wide)
    yield "gelu", lambda: run["gelu"](x, "tanh")
    yield "rope", lambda: run["rope"](q, k, cos, sin)
    yield "rope transposed", lambda: run["rope"](q.transpose(1, 2), k.transpose(1, 2), cos[:4], sin[:4])
    yield "cross_entropy", lambda: run["cross_entropy"](logits, target)
    yield "gmm_log_prob", lambda: run["gmm_log_prob"](mixtures, values)
    yield "gmm_log_prob no dy", lambda: run["gmm_log_prob"](mixtures, values.detach())


def reinplaced(gm) -> None:
    """The passes of Inductor that decide which outputs of a kernel are written in place and which are copied first."""
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    fake = next(v for v in values if isinstance(v, torch.Tensor)).fake_mode
    with V.set_fake_mode(fake):
        reinplace.canonicalize_view_scatter_ops(gm.graph)
        takes_graph = "graph" in inspect.signature(FakeTensorUpdater).parameters  # PyTorch 2.11
        reinplace.reinplace_inplaceable_ops(FakeTensorUpdater(gm.graph if takes_graph else gm), gm.graph)
        decompose_triton_kernel_wrapper_functional(gm.graph)


def summary(gm) -> dict:
    """Kernels, ops of whet's that stayed opaque, and copies, of a graph."""
    kernels, opaque, copies = [], [], []
    for n in gm.graph.nodes:
        if n.op == "call_function" and n.target is not operator.getitem:
            if "triton_kernel_wrapper" in str(n.target):
                kernel = kernel_side_table.get_kernel(n.kwargs["kernel_idx"])
                kernels.append(getattr(kernel, "fn", kernel).__name__)
            elif str(n.target).startswith("whet."):
                opaque.append(str(n.target))
            elif "clone" in str(n.target) or "scatter" in str(n.target):
                copies.append(str(n.target))
    return dict(kernels=kernels, opaque=opaque, copies=copies)


def joint(function, dynamic: bool) -> dict:
    """Forward and backward as AOTAutograd hands them over, before they are parted."""
    seen: list = []

    def partition(gm, inputs, **options):
        reinplaced(gm)
        seen.append(gm)
        raise Captured

    backend = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=partition)
    torch._dynamo.reset()
    try:
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)()
    except Exception as e:
        if not seen:
            raise RuntimeError(f"not traced: {e}") from e
    return summary(seen[0])


def main() -> None:
    torch.manual_seed(0)
    for name, function in steps():
        print(json.dumps(dict(name=name, device="cpu", **joint(function, False))))
    driver._active = Hopper()
    torch_ops._on_gpu = lambda args: True
    for dynamic in (False, True):
        for name, function in steps():
            print(json.dumps(dict(name=name, device="cuda", dynamic=dynamic, **joint(function, dynamic))))


if __name__ == "__main__":
    main()
