"""Text in and out of a model: a tokenizer, the chat template, and decoding that never shows half a character."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

HALF = "\ufffd"  # what bytes that are no whole character decode to
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LLAMA3, QWEN2 = _WORDS % "{1,3}", _WORDS % ""
PRE_TOKENIZERS = {  # llama.cpp's name for a way to cut text: (digits one by one first, the pattern of a piece)
    "default": (False, GPT2), "gpt-2": (False, GPT2), "smollm": (True, GPT2), "starcoder": (True, GPT2),
    "llama-bpe": (False, LLAMA3), "llama3": (False, LLAMA3), "llama-v3": (False, LLAMA3),
    "qwen2": (False, QWEN2), "deepseek-r1-qwen": (False, QWEN2),
}
CONTROL, USER_DEFINED = 3, 4
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")  # control tokens that end a text


class Text:
    """tokenizer: a tokenizers.Tokenizer. special: texts of special tokens by name, as templates use them ("bos_token")."""

    def __init__(self, tokenizer, template: str | None = None, special: Mapping[str, str] | None = None, name: str = "model"):
        self.tokenizer, self.template, self.name = tokenizer, template, name
        self.special = dict(special or {})
        self.bos = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos: tuple[int, ...] = () if eos is None else (eos,)

    def _id(self, name: str) -> int | None:
        text = self.special.get(name)
        return None if text is None else self.tokenizer.token_to_id(text)

    @classmethod
    def from_folder(cls, folder: Path) -> "Text":
        """tokenizer.json, with what tokenizer_config.json and chat_template.jinja say."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # tokenizers raises nothing narrower
            raise ValueError(f"{folder}: tokenizer.json cannot be read: {e}") from None
        settings = folder / "tokenizer_config.json"
        config = json.loads(settings.read_text()) if settings.is_file() else {}
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if (own := folder / "chat_template.jinja").is_file():
            template = own.read_text()
        return cls(tokenizer, template, {k: v for k, v in special.items() if isinstance(v, str)}, folder.name)

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any]) -> "Text":
        tokens, kind = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.model")
        if tokens is None or kind != "gpt2":
            raise ValueError(f"GGUF: tokenizer.ggml.model must be gpt2 (byte-level BPE), got {kind!r}")
        special = {}
        for name in ("bos", "eos", "unknown", "padding"):
            if (i := meta.get(f"tokenizer.ggml.{name}_token_id")) is not None and i < len(tokens):
                special[f"{name}_token"] = tokens[i]
        text = cls(_gguf_tokenizer(meta), meta.get("tokenizer.chat_template"), special, meta.get("general.name", "model"))
        kinds = meta.get("tokenizer.ggml.token_type", [])
        ends = [i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL and token in ENDS]
        text.eos = tuple(dict.fromkeys([*text.eos, *ends]))
        return text

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens. special: with what the tokenizer puts around a text; a chat template writes that itself."""
        check_text(text, "encode: text must be a string of whole characters")
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> "Detokenizer":
        return Detokenizer(self, skip_special)

    def chat_text(self, messages: Sequence[Mapping], answer: bool = True, **options) -> str:
        """The conversation as its model reads it. answer: up to where the model speaks. options go to the template."""
        import jinja2

        check_messages(messages)
        if self.template is None:
            raise ValueError(f"{self.name} has no chat template: give a plain prompt instead of messages")
        try:
            given = {"tools": None, "documents": None} | self.special | options
            return compiled(self.template).render(messages=list(messages), add_generation_prompt=answer, **given)
        except jinja2.TemplateError as e:
            raise ValueError(f"{self.name}: its chat template refuses the messages: {e}") from None

    def chat(self, messages: Sequence[Mapping], answer: bool = True, **options) -> list[int]:
        return self.encode(self.chat_text(messages, answer, **options), special=False)


class Detokenizer:
    """Tokens one at a time to text. What might still become another character is held until it is whole."""

    def __init__(self, text: Text, skip_special: bool = True):
        self.text, self.skip_special = text, skip_special
        self.tokens: list[int] = []
        self.before, self.read = 0, 0  # tokens decoded before are kept as context: some decoders treat the first apart

    def push(self, token: int) -> str:
        """What the token adds that is certain; often its text, sometimes nothing."""
        self.tokens.append(token)
        fresh = self._fresh()
        if fresh.endswith(HALF):
            return ""
        self.before, self.read = self.read, len(self.tokens)
        return fresh

    def extend(self, tokens: Iterable[int]) -> str:
        return "".join([self.push(t) for t in tokens])

    def end(self) -> str:
        """What was held, where no more tokens come."""
        fresh = self._fresh()
        self.before, self.read = self.read, len(self.tokens)
        return fresh

    def _fresh(self) -> str:
        shown = self.text.decode(self.tokens[self.before : self.read], self.skip_special)
        return self.text.decode(self.tokens[self.before :], self.skip_special)[len(shown) :]


def check_messages(messages) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"chat: messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}")
    for i, m in enumerate(messages):
        if not isinstance(m, Mapping) or "role" not in m or "content" not in m:
            raise ValueError(f"chat: messages[{i}] must have role and content, got {m!r}")
        for name in ("role", "content"):
            if not (m[name] is None and m.get("tool_calls")):  # a call of a tool may come without words
                check_text(m[name], f"chat: {name} of messages[{i}] must be text")


def check_text(text: Any, wanted: str) -> None:
    """Refuse what is no string, or holds half a character: that is how Python reads bytes that are not UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"{wanted}, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{wanted}, got half a character, {ascii(text[e.start])}, at place {e.start}: not UTF-8") from None


def compiled(template: str):
    """The template, sandboxed, with what Transformers lets templates use."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a model is trained on; for reading it is only its content."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals |= dict(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return env.from_string(template)


def _gguf_tokenizer(meta: Mapping[str, Any]):
    """llama.cpp's byte-level BPE as a tokenizers.Tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind = meta.get("tokenizer.ggml.pre", "default")
    if kind not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF: tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, got {kind!r}")
    digits, pattern = PRE_TOKENIZERS[kind]
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", [])
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pattern == LLAMA3))
    if pattern == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *([pre_tokenizers.Digits(individual_digits=True)] if digits else []),
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    for kind_of, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, kinds) if k == kind_of]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", pattern == LLAMA3):
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, bos)])
    return tokenizer
