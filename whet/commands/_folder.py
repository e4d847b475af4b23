"""whet optimize of a Hugging Face folder: its model, a random batch for it, and the record of what was replaced."""

import inspect
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.figures import error_line
from whet.isolation import quiet_transformers

BATCH, TOKENS = {"cpu": 2, "cuda": 4}, {"cpu": 64, "cuda": 2048}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WHOLE = ("ForSequenceClassification", "ForImageClassification")  # one label for a row
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class FolderOptions:
    """What was asked of a folder on the command line; None: the default.

    shorten   tokens beyond the positions that a model has are cut to these; else they are refused
    """

    train: bool | None = None
    batch: int | None = None
    tokens: int | None = None
    dtype: str = "auto"
    dry_run: bool = False
    allow: str = ""
    max_memory: str | None = None
    plans: bool | None = None
    shorten: bool = False

    def given(self) -> list[str]:
        """The options, as they are typed, that differ from their defaults."""
        named = {"--batch": self.batch, "--tokens": self.tokens, "--dtype": None if self.dtype == "auto" else self.dtype}
        named |= {"--allow": self.allow or None, "--max-memory": self.max_memory}
        flags = {"--train": self.train is True, "--infer": self.train is False, "--dry-run": self.dry_run}
        flags |= {"--plans": self.plans is True, "--no-plans": self.plans is False}
        return [*(k for k, on in flags.items() if on), *(k for k, v in named.items() if v is not None)]


def is_folder(target: str) -> bool:
    """Whether an argument of optimize is a model's folder: one with config.json, or a path that no other kind has."""
    from whet.models import discover

    if target.partition(":")[0].endswith(".py"):
        return False
    path = Path(target).expanduser()
    return (path / "config.json").is_file() or "/" in target or path.exists() and target not in discover()


def config_of(folder: Path) -> Any:
    """The config of a folder; ValueError in one line where it has none that Transformers knows."""
    if not folder.is_dir():
        raise ValueError(f"optimize: {folder}: {'it is a file; name its folder' if folder.exists() else 'no such folder'}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"optimize: {folder} has no config.json: it is no Hugging Face folder")
    try:
        from transformers import AutoConfig
    except ImportError:
        missing = "a Hugging Face folder needs Transformers, which is not installed: pip install transformers"
        raise ValueError(f"optimize: {missing}") from None
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"optimize: {folder}/config.json: Transformers cannot read it: {error_line(e)}") from None


def class_of(folder: Path, config: Any) -> Any:
    """The model's class, by `architectures`; where there is none, the causal language model of the config's type."""
    import transformers

    named = list(config.architectures or [])
    if not named:
        lm = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        return lm[type(config)] if type(config) in lm else transformers.MODEL_MAPPING[type(config)]
    found = getattr(transformers, named[0], None)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise ValueError(f"optimize: {folder}: Transformers {transformers.__version__} has no architecture {named[0]}")
    return found


def dtype_of(config: Any, asked: str, device: str) -> torch.dtype:
    """auto: the config's, else bfloat16 on a GPU and float32 on a CPU."""
    if asked != "auto":
        if asked not in DTYPES:
            raise ValueError(f"optimize: --dtype must be auto or one of {', '.join(DTYPES)}, got {asked!r}")
        return DTYPES[asked]
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    own = getattr(torch, own, None) if isinstance(own, str) else own
    return own if isinstance(own, torch.dtype) else torch.bfloat16 if device == "cuda" else torch.float32


def loaded(folder: Path, cls: Any, config: Any, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    """The model, and where its weights come from."""
    torch.manual_seed(0)
    if not any((folder / name).is_file() for name in WEIGHTS):
        try:
            with torch.device(device):  # a billion random numbers take a CPU half a minute
                return cls._from_config(config, dtype=dtype), "random: the folder has no model.safetensors"
        except Exception as e:
            raise ValueError(f"optimize: {folder}: {cls.__name__} cannot be built: {error_line(e)}") from None
    try:
        model, found = cls.from_pretrained(str(folder), dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as e:
        raise ValueError(f"optimize: {folder}: its weights cannot be loaded: {error_line(e)}") from None
    missing = len(found.get("missing_keys", ()))
    return model, f"loaded from the folder{f', except {missing} that are not there and random' if missing else ''}"


def label_of(cls: Any) -> str:
    """What labels a class takes: "tokens", "token classes", "classes", or "" where it has no loss that random labels suit."""
    if "labels" not in inspect.signature(cls.forward).parameters:
        return ""
    kinds = {"ForTokenClassification": "token classes"} | dict.fromkeys(WHOLE, "classes")
    token = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    return next((k for end, k in kinds.items() if cls.__name__.endswith(end)), "tokens" if cls.__name__.endswith(token) else "")


def sizes_of(config: Any, options: FolderOptions, device: str) -> tuple[int, int]:
    """(rows, tokens of each): as asked, else the defaults, as far as the model has positions."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    tokens = options.tokens or TOKENS[device]
    if longest and tokens > longest:
        if options.tokens and not options.shorten:
            raise ValueError(f"optimize: --tokens {tokens} is more than the model's {longest} positions")
        tokens = longest if options.tokens else 1 << (longest.bit_length() - 1)
    return options.batch or BATCH[device], tokens


def batch_of(model: Any, labels: str, train: bool, rows: int, tokens: int, device: str) -> dict:
    """Random tokens, images or sound, and labels where a step is trained."""
    config, dtype = model.config.get_text_config(), next(model.parameters()).dtype
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        made = torch.Generator().manual_seed(0)
        images = torch.randn(rows, config.num_channels, config.image_size, config.image_size, generator=made)
        classes = {"labels": torch.randint(0, config.num_labels, (rows,), generator=made)} if train else {}
        return {"pixel_values": images.to(device, dtype)} | {k: v.to(device) for k, v in classes.items()}
    frames = 2 * getattr(config, "max_source_positions", 0) if model.main_input_name == "input_features" else 0
    if model.main_input_name != "input_ids" and not frames or not getattr(config, "vocab_size", None):
        kind = type(model).__name__
        raise ValueError(f"optimize: {kind} takes {model.main_input_name}, not tokens alone; return model and batch from a "
                         "function, and name it: FILE.py:function")
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (rows, tokens), generator=made)
    found = {"input_ids": ids}
    if frames:
        found = {"input_features": torch.randn(rows, config.num_mel_bins, frames, generator=made).to(dtype)}
    if train:
        shape = (rows,) if labels == "classes" else (rows, tokens)
        found["labels"] = ids if labels == "tokens" else torch.randint(0, config.num_labels, shape, generator=made)
    elif config.is_encoder_decoder:
        found["decoder_input_ids"] = ids
    return {k: v.to(device) for k, v in found.items()}


def trains(cls: Any, labels: str, asked: bool | None) -> bool:
    if asked and not labels:
        raise ValueError(f"optimize: {cls.__name__} has no loss by labels that could be made up; use --infer")
    return bool(labels) if asked is None else asked


@dataclass(frozen=True)
class FolderModel:
    """A folder's model with its batch, ready for whet.optimize."""

    model: nn.Module
    batch: dict
    train: bool
    rows: int
    tokens: int | None  # None: of images
    dtype: str
    weights: str

    @property
    def shape(self) -> list[int]:
        """[rows, tokens], or [images]."""
        return [self.rows] if self.tokens is None else [self.rows, self.tokens]

    @property
    def size(self) -> str:
        """'4 x 2,048 random tokens', '128 random images', '4 random sounds with 448 tokens'."""
        if "input_features" in self.batch:
            return f"{self.rows} random sounds with {self.tokens:,} tokens"
        return f"{self.rows} random images" if self.tokens is None else f"{self.rows} x {self.tokens:,} random tokens"

    @property
    def options(self) -> str:
        """As a command says it."""
        tokens = "" if self.tokens is None else f" --tokens {self.tokens}"
        return f"--batch {self.rows}{tokens} --dtype {self.dtype}"

    def lines(self, options: FolderOptions, device: str) -> list[str]:
        count = sum(p.numel() for p in self.model.parameters())
        small = " (small, since there is no GPU here)" if device == "cpu" and not (options.batch and options.tokens) else ""
        step = "a training step" if self.train else "a forward pass"
        return [
            f"{type(self.model).__name__}, {count:,} parameters in {self.dtype}; weights {self.weights}",
            f"{step} of {self.size}{small}",
        ]


def folder_model(folder: Path, options: FolderOptions) -> FolderModel:
    """The model of a folder on this machine's device, refused where it does not fit the memory or does not run."""
    from whet.commands._memory import refuse_folder_that_does_not_fit

    config, device = config_of(folder), "cuda" if torch.cuda.is_available() else "cpu"
    with quiet_transformers():
        cls = class_of(folder, config)
        labels, dtype = label_of(cls), dtype_of(config, options.dtype, device)
        train, (rows, tokens) = trains(cls, labels, options.train), sizes_of(config, options, device)
        refuse_folder_that_does_not_fit(folder, cls, config, dtype, train or not options.dry_run, device)
        model, weights = loaded(folder, cls, config, dtype, device)
        model = model.to(device).train(train)
        batch = batch_of(model, labels, train, rows, tokens, device)
        try:
            with torch.no_grad(), torch.random.fork_rng():
                model(**batch)
        except Exception as e:
            raise ValueError(f"optimize: {folder}: the forward of {cls.__name__} raised {error_line(e)}") from None
    of_tokens = None if "pixel_values" in batch else tokens
    return FolderModel(model, batch, train, rows, of_tokens, str(dtype).removeprefix("torch."), weights)


def optimized_folder(
    target: str, options: FolderOptions, lock: Any, seconds: float, progress: Any
) -> tuple[str, dict, list[str]]:
    """(the command that makes it again, what was measured, lines about what was taken) of a folder."""
    from whet.swap._optimize import optimize
    from whet.swap._preview import preview

    folder = Path(target).expanduser()
    taken = folder_model(folder, options)
    mode, plans = "train" if taken.train else "infer", wants_plans(options, taken.train)
    try:
        if options.dry_run:
            report: Any = preview(taken.model, taken.batch, mode=mode, lock=lock)
        else:
            report = optimize(
                taken.model, taken.batch, mode=mode, lock=lock, seconds=seconds, progress=progress, allow=options.allow,
                max_memory=options.max_memory,
            ).whet
    except torch.cuda.OutOfMemoryError:
        raise ValueError(f"optimize: {folder}: out of memory at {taken.size}; use a smaller --batch "
                         "or fewer --tokens") from None
    lines = taken.lines(options, "cuda" if torch.cuda.is_available() else "cpu")
    said = f"whet optimize {shlex.quote(target)} --{mode} {taken.options}"
    facts = {"target": folder.resolve().name, "config": lines[0], "batch": taken.shape, "dtype": taken.dtype}
    measured = facts | {"weights": taken.weights, "notes": lines} | report.to_record()
    if plans:
        progress("trying the plans of the step", 0, 1)
        measured["step_plans"] = plans_of(taken, seconds)
    said += f" --allow {options.allow}" if options.allow else ""
    said += f" --max-memory {options.max_memory}" if options.max_memory else ""
    said += " --plans" if "step_plans" in measured else ""
    return f"{said}{' --dry-run' if options.dry_run else ''}", measured, lines


def wants_plans(options: FolderOptions, train: bool) -> bool:
    """Whether the plans of compile_step are tried: asked for, or by default on a GPU."""
    if options.plans and (not train or options.dry_run):
        raise ValueError(f"optimize: --plans needs a training step that is run, not {'--dry-run' if train else '--infer'}")
    return train and not options.dry_run and (torch.cuda.is_available() if options.plans is None else options.plans)


def plans_of(taken: FolderModel, seconds: float) -> dict:
    """The step of the optimised model with AdamW by each plan of compile_step, as a record."""
    from whet.step_plans import LoopWork, choose

    optimizer = torch.optim.AdamW(taken.model.parameters(), lr=1e-5, capturable=torch.cuda.is_available())
    return choose(LoopWork(taken.model, (), taken.batch, "train", optimizer), seconds).to_record()
