"""Prompts of a wrong kind: a line that names what was expected and got, and the others of a batch are served."""

import pytest
import torch
from small_decoder import small_llm, small_model

from whet import LLM

WANTED = "a prompt is text or a list of token numbers, got "
WRONG = {
    "none": (None, WANTED + "NoneType"),
    "number": (5, WANTED + "int"),
    "surrogate": ("a\udcff", WANTED + r"half a character, '\udcff', at place 1: not UTF-8"),
    "bytes": (b"abc", WANTED + "bytes"),
    "dict": ({"role": "user"}, WANTED + "dict"),
    "set": ({1, 2}, WANTED + "set"),
    "float": ([1, 2.5], "tokens must be whole numbers from 0 to 95, the vocabulary, got 2.5"),
    "scalar": (torch.tensor(3), WANTED + "a tensor of shape () and torch.int64"),
    "floats": (torch.ones(2), WANTED + "a tensor of shape (2,) and torch.float32"),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return small_llm(small_model(), max_batch=2)


@pytest.mark.parametrize("prompt, error", WRONG.values(), ids=WRONG)
def test_a_prompt_of_a_wrong_kind_is_an_error_of_its_own(llm, prompt, error):
    first, wrong, last = llm.generate(["hello", prompt, [1, 2]], max_new_tokens=3)
    assert (wrong.reason, wrong.error, wrong.tokens) == ("error", error, [])
    assert first.tokens == llm.generate("hello", max_new_tokens=3).tokens and last.reason == "length"
    for alone in (llm.generate, llm.stream):
        with pytest.raises(ValueError) as refused:
            alone(prompt)
        assert str(refused.value) == error


def test_tokens_may_be_a_tensor(llm):
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    wanted = [llm.generate(row.tolist(), max_new_tokens=3).tokens for row in tokens]
    assert [c.tokens for c in llm.generate(tokens, max_new_tokens=3)] == wanted
    assert llm.generate(tokens[1], max_new_tokens=3).tokens == wanted[1]
    assert [c.tokens for c in llm.generate([tokens[0]], max_new_tokens=3)] == wanted[:1]
