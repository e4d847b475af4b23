"""What Transformers computes from an exported model, and how far float64 may be off: shared by the tests of models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch


def same_in_float64(ours: torch.Tensor, theirs: torch.Tensor, c: Any) -> None:
    """Apart from the order of sums: so many terms, so many roundings of float64 at most."""
    assert ours.dtype == theirs.dtype == torch.float64 and ours.shape == theirs.shape
    width, inner = (c.width, c.hidden) if hasattr(c, "width") else (c.hidden, c.ffn)
    terms = c.layers * (2 * width + 2 * inner + c.max_positions) + c.vocab
    assert (ours - theirs).abs().max() <= terms * torch.finfo(torch.float64).eps * theirs.abs().max()


def loaded(folder: Path, config: dict, state: dict) -> Any:
    """The exported model as Transformers loads it from a folder: every parameter is there, and none is left over."""
    transformers, safetensors = pytest.importorskip("transformers"), pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    options = dict(attn_implementation="sdpa", output_loading_info=True)  # eager rounds its weights to float32
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert type(theirs).__name__ == config["architectures"][0]
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return theirs


@torch.no_grad()
def transformers_logits(model: Any, ours: Any, tokens: torch.Tensor) -> torch.Tensor:
    """In float64 throughout, with whet's tables of angles: Transformers computes both in float32 whatever the dtype."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def angles(self, x, position_ids):
        return tuple(torch.cat([t, t], -1)[position_ids] for t in (ours.cos, ours.sin))

    for m in model.double().eval().modules():
        if type(m).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            m.forward = (norm if type(m).__name__.endswith("RMSNorm") else angles).__get__(m)
    return model(tokens).logits
