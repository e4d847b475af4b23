"""What a recipe makes: the model, its batches, and the sizes by which a step is counted."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.choices import Choices
from whet.figures import error_line
from whet.isolation import quiet_transformers
from whet.models import find
from whet.swap import Journal, Met
from whet.swap import _memory as memory
from whet.train.recipe import TrainRecipe, nearest

Batch = dict[str, torch.Tensor]


@dataclass
class TrainedModel:
    """A model that returns its loss.

    inputs   makes what its forward takes of a loader's tokens and labels, or features and targets
    vocab    ids that it knows; 0 where it takes tasks
    facts    its configuration, for run.json and for sampling
    note     what is to be said of its weights
    """

    model: nn.Module
    inputs: Callable[[Batch], Batch]
    vocab: int
    facts: dict[str, Any]
    note: str = ""

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Of forward and backward: six for each weight of a product, and attention's two products over the whole square.

        Of a task: attention over its context, and heads, the weights with three dimensions, of targets alone.
        """
        heads = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Linear)}
        tables = {id(m.weight): m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)}
        wide = [key for key, w in tables.items() if w.shape[0] >= self.vocab]  # that of tokens is the first
        looked_up = set(tables) - heads - set(wide[:1] if self.facts.get("tied") else [])
        seen, products = self.facts.get("context") or 0, [p for p in self.model.parameters() if id(p) not in looked_up]
        weights = sum(p.numel() * (1 - seen / seq_len if p.dim() > 2 else 1) for p in products if p.dim() >= 2)
        return 6.0 * weights + 12.0 * self.facts.get("layers", 0) * self.facts.get("width", 0) * (seen or seq_len)


def config_of(recipe: TrainRecipe, vocab: int | None) -> tuple[Any, Any]:
    """(the model of whet/models, its configuration with the recipe's changes); vocab: that of the data, where none is set."""
    part = recipe.model
    model, size = find(f"{part.name}:{part.size}" if part.size else part.name)
    config, changes = model.sizes[size], dict(part.changes)
    if (model.takes == "tasks") != bool(recipe.data.tasks):
        fix = 'set data.tasks = "gp"' if model.takes == "tasks" else "leave data.tasks empty"
        raise ValueError(f"recipe: {part.name} takes {model.takes}, got data.tasks {recipe.data.tasks!r}; {fix}")
    known = {f.name: f for f in fields(config)}
    if unknown := [k for k in changes if k not in known]:
        raise ValueError(f"recipe: model {part.name} has no {unknown[0]!r}; {nearest(unknown[0], known)}")
    if vocab is not None and "vocab" in known:
        changes.setdefault("vocab", vocab)
    longest = changes.get("max_positions", getattr(config, "max_positions", None))
    if longest is not None and recipe.train.seq_len > longest:
        if "max_positions" in changes:
            raise ValueError(f"recipe: train.seq_len {recipe.train.seq_len} is more than model.max_positions {longest}")
        changes["max_positions"] = recipe.train.seq_len
    return model, replace(config, **changes)


def built(recipe: TrainRecipe, device: str, vocab: int | None = None) -> TrainedModel:
    """The recipe's model with its first weights, on the device, in the precision it is trained in."""
    made = from_folder(recipe) if recipe.model.path else of_whet(recipe, vocab)
    made.model = made.model.to(device).train()
    if recipe.train.precision == "bfloat16-weights":
        for p in made.model.parameters():  # buffers stay: a rotation's angles lose too much in 16 bits
            p.data = p.data.to(torch.bfloat16)
    return made


def of_whet(recipe: TrainRecipe, vocab: int | None) -> TrainedModel:
    model, config = config_of(recipe, vocab)
    module = model.build(config, model.tuned, Choices(), seed=recipe.train.seed)
    facts = {f.name: getattr(config, f.name) for f in fields(config)}
    facts |= {"width": facts.get("width", facts.get("hidden"))}
    facts |= {"context": recipe.data.context} if recipe.data.tasks else {}
    return TrainedModel(module, lambda batch: batch, getattr(config, "vocab", 0), facts)


def from_folder(recipe: TrainRecipe) -> TrainedModel:
    """A Hugging Face folder's causal language model, which shifts its labels itself."""
    folder = Path(recipe.model.path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"recipe: model.path: {folder} has no config.json: it is no Hugging Face folder")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("recipe: model.path needs Transformers, which is not installed: pip install transformers") from None
    torch.manual_seed(recipe.train.seed)
    note = f"{folder} has no weights: training begins with random ones"
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            if any(folder.glob("*.safetensors")):
                how: Any = dict(local_files_only=True, dtype=torch.float32, output_loading_info=True)
                loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder), **how)
                model, found = loaded
                lacking = sorted(found["missing_keys"])
                note = f"{folder} lacks {len(lacking)} weights, {lacking[0]} first: these begin random" if lacking else ""
            elif pickled := sorted(folder.glob("*.bin")):
                raise ValueError(f"{pickled[0].name} is a pickle, which whet does not load; save its weights as safetensors")
            else:
                model = AutoModelForCausalLM.from_config(config)
    except Exception as e:
        raise ValueError(f"recipe: model.path: {folder}: {error_line(e)}") from None
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and recipe.train.seq_len >= longest:
        why = f"its {longest} positions, one of which is the last label's"
        raise ValueError(f"recipe: train.seq_len must be below {longest} for {folder}: {why}; got {recipe.train.seq_len}")
    facts = {"path": str(folder), "layers": text.num_hidden_layers, "width": text.hidden_size, "vocab": text.vocab_size}

    def inputs(batch: Batch) -> Batch:
        """Labels not shifted: a row is one token longer than train.seq_len."""
        whole = torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1)
        return dict(input_ids=whole, labels=whole)

    return TrainedModel(model, inputs, text.vocab_size, facts, note)


def checkpoint_blocks(model: nn.Module, batch: Batch, count: int) -> int:
    """So many of the model's repeated blocks, -1 for all, keep no activations from now on; how many do so."""
    if not count:
        return 0
    blocks = memory.blocks_of(model, Met((), batch))
    if count > len(blocks):
        raise ValueError(f"recipe: train.checkpointed_blocks is {count}, and the model has {len(blocks)} repeated blocks")
    for _, block in blocks if count < 0 else blocks[:count]:
        Journal().make(memory.edits(block, Choices()))
    return len(blocks) if count < 0 else count
