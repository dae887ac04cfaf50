"""Text to token ids and back: a model's tokenizer, a table that makes it faster, a decoder for answers that grow.

Invariant: texts and ids equal those of ``transformers.AutoTokenizer`` on the same folder (held by tests).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seamless_verl.errors import ConfigError
from seamless_verl.places import error_in_words

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
# Names under which a model's configuration lists what stands for pictures and videos, the usual ones first.
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
_VIDEO_TOKENS = ("video_token_id", "video_token_index")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# `tokenizers`' ByteLevel(use_regex=True): the expression of GPT-2.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MAX_WORDS = 1 << 16
_PIECES = ("a", "B", "7", " ", "\n", "\r", "\t", "'", "'s", "'LL", "_", "<", "://", "  ", "\n\n")
_CORE = ("ab", " ", "\n", "'s", "12", "-")
UNDECODED = "�"
"""What a decoder writes for bytes that are no character yet."""
_MAX_UNDECODED = 64


class FolderTokenizer:
    """The tokenizer and chat template of one model folder; the attributes carry transformers' names.

    Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``, without transformers and torch: it
    opens in milliseconds where importing transformers takes seconds.

    Args:
        template: instead of the folder's chat template, which then may lack.

    Raises:
        ConfigError: the folder lacks a file, or one of them cannot be read.
    """

    def __init__(self, folder: Path, template: str | None = None) -> None:
        from tokenizers import Tokenizer

        self.folder = folder
        self.backend_tokenizer: Tokenizer = Tokenizer.from_str(_text(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()  # of whoever saved it
        self.backend_tokenizer.no_padding()
        config = _json(folder / "tokenizer_config.json")
        self.clean_up_tokenization_spaces = bool(config.get("clean_up_tokenization_spaces", False))
        self._special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}
        listed = _json(folder / "generation_config.json", missing={}).get("eos_token_id")
        eos = self.backend_tokenizer.token_to_id(self._special.get("eos_token", ""))
        self.eos_token_id: int | None = eos
        ids = [eos, *(listed if isinstance(listed, list) else [listed])]
        #: ids that end an answer: the tokenizer's, and those that the model's generation config adds
        self.stop_token_ids = tuple(sorted({token for token in ids if token is not None}))
        self._template_text = template or _template(folder, config)
        model = _json(folder / "config.json", missing={})
        #: id of the token that the template writes for a picture; None for a model that takes none
        self.image_token_id = _listed(model, _IMAGE_TOKENS)
        self._placeholder_ids = (self.image_token_id, _listed(model, _VIDEO_TOKENS))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def placeholders(self) -> dict[int, str]:
        """Tokens that stand for pictures and videos and mean nothing without one, id to text: never to be generated.

        Raises:
            ConfigError: one of them is no token of this tokenizer, so that nobody can be told which is meant.
        """
        found = {}
        for token in self._placeholder_ids:
            if token is not None:
                text = found[token] = self.backend_tokenizer.id_to_token(token) or ""
                if self.encode(text, add_special_tokens=False) != [token]:
                    story = f"has no token {token}, which config.json names for pictures or videos"
                    fix = "name the model's own folder, or for text alone a copy of it without config.json"
                    raise ConfigError("--tokenizer", self.folder, story, fix)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **arguments: Any,
    ) -> str:
        """The prompt's text; ``tokenize`` must be False, ids come from :meth:`encode`."""
        assert not tokenize
        return self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special, **arguments},
        )

    @cached_property
    def _template(self) -> Template:
        template: Template = _environment().from_string(self._template_text)
        return template


def open_tokenizer(source: str, template: str | None = None) -> FolderTokenizer:
    """The tokenizer of a model folder, or of a model on the Hugging Face Hub (its small files are fetched or cached).

    Raises:
        ConfigError: there is no such model, or it comes without a tokenizer that can be read.
    """
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(source, allow_patterns=list(_FILES)))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            fix = "--tokenizer FOLDER with the model's tokenizer.json and chat template"
            problem = f"no such folder, and not on the Hub ({error_in_words(error)})"
            raise ConfigError("--tokenizer", source, problem, fix) from error
    return FolderTokenizer(folder, template)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        fix = "name a folder that holds tokenizer.json, tokenizer_config.json and a chat template"
        raise ConfigError("--tokenizer", path, f"cannot be read: {error}", fix) from error


def _json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError("--tokenizer", path, f"is not valid JSON: {error}", "fetch the model again") from error
    return value if isinstance(value, dict) else {}


def _listed(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _template(folder: Path, config: dict[str, Any]) -> str:
    """The default chat template: a file of its own, or an entry of the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _text(file)
    # Older models with a processor keep the template that knows pictures here.
    found = _json(folder / "chat_template.json", missing={}).get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    if not isinstance(found, str):
        fix = "take an instruction-tuned model, or put a chat_template.jinja into a copy of the folder"
        raise ConfigError("--tokenizer", folder, "has no chat template", fix)
    return found


def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates (``utils/chat_template_utils.py``)."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the model says; nobody here reads the mark."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own protocol

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class WordCache:
    """Token ids of ASCII text from a table of words, several times faster than the tokenizer that fills it.

    A byte-level BPE tokenizer cuts text into words by a regular expression and merges inside words only, so that the
    ids of a text are those of its words in a row::

        text ──special tokens──▶ stretches ──regular expression──▶ words ──table──▶ ids
                                                                     └─ not in it: ask the tokenizer, keep the answer

    Text that is not printable ASCII (where two engines of regular expressions could disagree), tokenizers of another
    build, and any that fail a comparison on short texts are left to the tokenizer. Made by :meth:`of`. Threads may
    share one: entries never change.
    """

    def __init__(self, backend: Tokenizer, words: Any, special: Any, special_ids: dict[str, int]) -> None:
        self._backend = backend
        self._find_words = words.findall
        self._split = special.split if special is not None else lambda text: [text]
        self._special_ids = special_ids
        self._ids: dict[str, list[int]] = {}

    @classmethod
    def of(cls, backend: Tokenizer) -> WordCache | None:
        """A table for this tokenizer; None where its results could differ."""
        try:
            import regex  # comes with transformers
        except ImportError:
            return None
        expression = _expression_of(backend)
        added = backend.get_added_tokens_decoder()
        if expression is None or any(
            token.lstrip or token.rstrip or token.single_word or token.normalized for token in added.values()
        ):
            return None
        try:
            words = regex.compile(expression)
        except regex.error:
            return None
        if words.groups:
            return None
        names = {token.content: number for number, token in added.items()}
        # The longest of several special tokens that begin at the same place wins, as in the tokenizer.
        ordered = sorted(names, key=len, reverse=True)
        special = regex.compile(f"({'|'.join(map(regex.escape, ordered))})") if names else None
        cache = cls(backend, words, special, names)
        return cache if cache._agrees(ordered[:2]) else None

    def encode(self, text: str) -> list[int] | None:
        """Ids without added special tokens; None when only the tokenizer can encode this text."""
        if not text.isascii():
            return None
        ids: list[int] = []
        known = self._ids
        for stretch in self._split(text):
            special = self._special_ids.get(stretch)
            if special is not None:
                ids.append(special)
                continue
            words = self._find_words(stretch)
            if len("".join(words)) != len(stretch):
                return None
            for word in words:
                found = known.get(word)
                if found is None:
                    found = self._learn(word)
                    if found is None:
                        return None
                ids += found
        return ids

    def _learn(self, word: str) -> list[int] | None:
        if not all(letter.isprintable() or letter in "\n\r\t" for letter in word):
            return None
        if len(self._ids) >= _MAX_WORDS:
            self._ids.clear()
        ids: list[int] = self._backend.encode(word, add_special_tokens=False).ids
        self._ids[word] = ids
        return ids

    def _agrees(self, special: Iterable[str]) -> bool:
        pieces = (*_PIECES, *special)
        texts = ["".join(parts) for parts in (*product(pieces, pieces), *product(_CORE, repeat=3))]
        theirs = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return all(self.encode(text) == found.ids for text, found in zip(texts, theirs, strict=True))


def _expression_of(backend: Tokenizer) -> str | None:
    """How the tokenizer cuts text into words; None when that is not one regular expression before byte-level BPE."""
    if type(backend.model).__name__ != "BPE" or getattr(backend.model, "dropout", None):
        return None
    if backend.truncation is not None or backend.padding is not None or backend.pre_tokenizer is None:
        return None
    # On ASCII, Unicode's composed form changes nothing.
    if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":
        return None
    cut: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    if cut["type"] == "Sequence" and len(cut["pretokenizers"]) == 2:
        split, last = cut["pretokenizers"]
        is_plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        expression = split.get("pattern", {}).get("Regex") if is_plain else None
        return expression if last["type"] == "ByteLevel" and not last["use_regex"] and _bare(last) else None
    return _GPT2 if cut["type"] == "ByteLevel" and cut["use_regex"] and _bare(cut) else None


def _bare(byte_level: dict[str, Any]) -> bool:
    return not byte_level["add_prefix_space"]


class TextDecoder:
    """Token ids to text, as they come; only whole characters leave.

    Decodes a window of the last few tokens, so that an answer costs linear time. Bytes that do not become a character
    within a few tokens end the early decoding; the whole answer is decoded at its end anyway.

    Args:
        open_ids: tokens that may still change what stands before them (:func:`open_ids_of`).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], open_ids: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._open_ids = open_ids
        self._ids: list[int] = []
        self._start = self._read = self._num_undecoded = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens settle."""
        self._ids.extend(token_ids)
        if self._num_undecoded > _MAX_UNDECODED or (self._ids and self._ids[-1] in self._open_ids):
            return ""
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(known) or text.endswith(UNDECODED):
            self._num_undecoded += len(token_ids)
            return ""
        # The window starts with what was read last: some decoders treat the first token of a text in a special way.
        self._start, self._read, self._num_undecoded = self._read, len(self._ids), 0
        return text[len(known) :]


def open_ids_of(backend: Tokenizer, *, skips_special: bool) -> frozenset[int]:
    """Single bytes of a vocabulary that falls back to them (``<0xE2>``: Llama 2, Mistral, Gemma); others have none.

    Their decoder reads a run of bytes as a whole: one cut character makes each byte of the run a replacement character,
    also those of whole characters before it. Special tokens that are not shown do not end a run.
    """
    named = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    singles = frozenset(token for token in named if token is not None)
    if not singles or not skips_special:
        return singles
    return singles | {token for token, added in backend.get_added_tokens_decoder().items() if added.special}


def bytes_of(piece: str) -> bytes | None:
    """What a token of a byte-level vocabulary stands for, or one of those that fall back to bytes (``<0xE2>``).

    Args:
        piece: the vocabulary's own spelling of it.
    """
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes.fromhex(piece[3:5])
    try:
        return bytes(_BYTE_LEVEL[letter] for letter in piece)
    except KeyError:
        return None


def _byte_level() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for what follows Latin-1."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()
