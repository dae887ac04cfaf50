"""A tokenizer and its chat template from a model's folder, without transformers and torch.

What :class:`~seamless_verl.proxy.text.chat_template.TokenizerRenderer` asks of a Hugging Face tokenizer, read from
``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``. It opens in milliseconds where importing
transformers takes seconds.

Invariant: texts and ids equal those of ``transformers.AutoTokenizer`` on the same folder (held by a test).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seamless_verl.errors import ConfigError

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


class FolderTokenizer:
    """The tokenizer of one model folder; the attributes carry transformers' names.

    Raises:
        ConfigError: the folder lacks a file, or one of them cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._folder = folder
        self.backend_tokenizer: Tokenizer = Tokenizer.from_str(_text(folder / "tokenizer.json"))
        config = _json(folder / "tokenizer_config.json")
        self.clean_up_tokenization_spaces = bool(config.get("clean_up_tokenization_spaces", False))
        self._special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}
        listed = _json(folder / "generation_config.json", missing={}).get("eos_token_id")
        eos = self.backend_tokenizer.token_to_id(self._special.get("eos_token", ""))
        self.eos_token_id: int | None = eos
        ids = [eos, *(listed if isinstance(listed, list) else [listed])]
        #: ids that end an answer: the tokenizer's, and those that the model's generation config adds
        self.stop_token_ids = tuple(sorted({token for token in ids if token is not None}))
        self._template_text = _template(folder, config)
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
                    raise ConfigError("--tokenizer", self._folder, story, fix)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

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


def open_tokenizer(source: str) -> FolderTokenizer:
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
            story = str(error).strip().splitlines()[0]
            fix = "--tokenizer FOLDER with the model's tokenizer.json and chat template"
            raise ConfigError("--tokenizer", source, f"no such folder, and not on the Hub: {story}", fix) from error
    return FolderTokenizer(folder)


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
