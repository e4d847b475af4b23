"""Models of Hugging Face's transformers with random weights, for `whet doctor` and `whet profile`.

whet doctor examples/transformers_models.py:qwen3 --decode
whet doctor examples/transformers_models.py:gpt2
"""

import torch


def qwen3(device: str = "cpu"):
    """Qwen3-0.6B: 28 layers of 1024, 16 heads over 8, a vocabulary of 151,936; in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=4096,
    )
    return decoder(Qwen3ForCausalLM, config, device, tokens=32)


def tiny_qwen3(device: str = "cpu"):
    """The same in small, for a CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )
    return decoder(Qwen3ForCausalLM, config, device, tokens=32)


def decoder(kind, config, device: str, tokens: int):
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(config).to(torch.bfloat16)
        ids = torch.randint(config.vocab_size, (1, tokens))
    return model, dict(input_ids=ids, labels=ids)


def gpt2(device: str = "cpu", batch: int = 4, tokens: int = 512):
    """GPT-2 of 124M parameters in training, with a fused AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config())
        ids = torch.randint(50257, (batch, tokens))
    return model, dict(input_ids=ids, labels=ids), torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
