"""One token at a time: a decoder's step with its cache filled, as generate() runs it."""

import inspect
from dataclasses import replace

import torch

from whet.diagnose.target import CannotRun, Target, raised

PROMPT = 16  # tokens in the cache before the first step that is looked at


def as_decode(target: Target) -> Target:
    """The step that makes the next token, for models with Transformers' interface; others give one as "step"."""
    if target.step_with is not None:
        return replace(target, kind="decode")
    parameters = inspect.signature(target.model.forward).parameters
    if not {"input_ids", "past_key_values", "use_cache"} <= set(parameters):
        raise CannotRun(
            f"{target.name}: to decode, the model's forward must take input_ids, past_key_values and use_cache, as "
            "Transformers' do; or return a dict with a step of your own: {'model': ..., 'step': function}"
        )
    ids = target.kwargs.get("input_ids", target.args[0] if target.args else None)
    if ids is None:
        raise CannotRun(f"{target.name}: the batch has no input_ids to begin from")
    ids = ids[:1, :PROMPT]
    model = target.model.eval()
    try:
        with torch.no_grad():
            out = model(input_ids=ids, use_cache=True)
        state = {"past": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}
    except Exception as e:
        raise CannotRun(f"{target.name}: the prompt's forward raised {raised(e)}") from e

    def step():
        with torch.no_grad():
            out = model(input_ids=state["token"], past_key_values=state["past"], use_cache=True)
            state["past"], state["token"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    said = f"decoding at batch 1 after a prompt of {ids.shape[1]} tokens; the cache grows as generate() grows it"
    return replace(target, kind="decode", step_with=step, notes=[*target.notes, said])
