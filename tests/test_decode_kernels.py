"""The decode kernels where a GPU would choose otherwise than the interpreter: tiles, batches, what ends a step."""

import sys

import pytest
import torch
from conftest import case_id

from whet import machine
from whet.decode.note import note
from whet.op import discover
from whet.verify import verify_case

OPS = discover()
gemm = sys.modules["whet.ops._gemm"]


@pytest.fixture
def modern(monkeypatch):
    """The launchers take this machine for a GPU of compute capability 9.0."""
    monkeypatch.setattr(gemm, "modern", lambda: True)


@pytest.mark.usefixtures("modern")
@pytest.mark.parametrize("quant", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("name, size", [("norm_linear", "N"), ("norm_swiglu", "F"), ("linear_add", "N")])
def test_some_rows_of_x(name, size, quant, device):
    for M, K in ((5, 192), (16, 1088)):
        verdict = verify_case(OPS[name], "triton", {"M": M, "K": K, size: 20, "quant": quant}, "bfloat16", device, grad=False)
        assert verdict.ok, (M, K, verdict.why)


@pytest.mark.usefixtures("modern")
@pytest.mark.parametrize(
    "case", [dict(K=576, N=40, bias=True), dict(K=72, N=9, layout="sliced"), dict(K=256, N=24, quant="int4")], ids=case_id
)
def test_a_product_summed_in_parts(case, device):
    verdict = verify_case(OPS["linear_add"], "triton", dict(M=20) | case, "bfloat16", device, grad=False)
    assert verdict.ok, verdict.why


ATTENTION = OPS["cached_attention"]
CASES = (
    dict(B=5, H=2, KV=1, D=16, S=200), dict(B=4, H=4, KV=2, D=24, S=90, window=30), dict(B=9, H=2, KV=1, D=16, S=300),
    dict(B=1, H=2, KV=1, D=16, S=700), dict(B=4, H=2, KV=1, D=16, S=300, T=2),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_attention_of_few_sequences_and_of_many(case, device):
    verdict = verify_case(ATTENTION, "triton", case, "bfloat16", device, grad=False)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("at, T", [(188, 8), (191, 1), (192, 1), (380, 5)])
def test_attention_where_chunks_grow(at, T, device, monkeypatch):
    """With three chunks a token that sees more than 192 keys has two spans in each, one that sees more than 384 has three."""
    monkeypatch.setattr(machine, "sm_count", lambda: 3)
    monkeypatch.setattr(sys.modules["whet.ops.cached_attention"], "PROGRAMS", 1)
    case = dict(B=1, H=2, KV=1, D=16, S=at + T + 30, T=T, at=at)
    verdict = verify_case(ATTENTION, "triton", case, "bfloat16", device, grad=False)
    assert verdict.ok, verdict.why


def test_the_end_of_a_step_is_noted_once_for_all(device):
    position, advance = (torch.tensor(x, device=device) for x in ([5, 6, 7, 9, 2, 0, 0], [1, 0, 1, 1, 1, 0, 0]))
    token, out_tokens = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in (4, (4, 8)))
    logit = torch.zeros(4, 8, device=device)
    chosen, value = torch.tensor([11, 12, 13], device=device), torch.tensor([1.0, 2.0, 3.0], device=device)
    note(chosen, value, token, out_tokens, logit, position, advance, 4)
    assert token.tolist() == [11, 12, 13, 0] and position.tolist() == [6, 6, 8, 10, 3, 0, 0]
    assert out_tokens[:, 2].tolist() == [11, 12, 13, 0] and logit[:, 2].tolist() == [1, 2, 3, 0]
    assert out_tokens.count_nonzero() == 3 and logit.count_nonzero() == 3
