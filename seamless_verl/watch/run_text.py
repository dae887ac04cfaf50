"""Tokens of a run as text: decoded with the model folder that the run names, or with the user's; never fetched."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.observe.run_folder import CONFIG
from seamless_verl.proxy.text.tokenizer import FolderTokenizer
from seamless_verl.watch import transcript
from seamless_verl.watch.run_places import Place


class RunText:
    """Turns tokens of a run into text, where there is a tokenizer.

    Args:
        given: folder given by the user; ``None``: the run's own.

    Attributes:
        why_none: why numbers stand for the text; empty: they do not, or nobody has asked for text yet.
    """

    def __init__(self, place: Place, given: Path | None) -> None:
        self._place = place
        self._given = given
        self._tokenizer: FolderTokenizer | None = None
        self.why_none = ""

    def decode(self) -> transcript.Decode:
        tokenizer = self._loaded()
        return tokenizer.decode if tokenizer is not None else transcript.numbers_for_text

    def of_token(self, token: int) -> str:
        """One token, special ones included; of a part of a character the vocabulary's own spelling, which says more."""
        tokenizer = self._loaded()
        if tokenizer is None:
            return str(token)
        text: str = tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
        return text if "\ufffd" not in text else str(tokenizer.backend_tokenizer.id_to_token(token))

    def _loaded(self) -> FolderTokenizer | None:
        if self._tokenizer is None and not self.why_none:
            try:
                self._tokenizer = FolderTokenizer(self._folder())
            except (SeamlessError, OSError, ValueError) as error:
                self.why_none = f"Numbers stand for the text: {error}"
        return self._tokenizer

    def _folder(self) -> Path:
        if self._given is not None:
            return self._given
        from omegaconf import OmegaConf

        file = self._place.path / CONFIG
        if not file.is_file():
            story = f"{self._place.name} does not say which model it was recorded with"
            raise ConfigError("--tokenizer", None, story, "name the model's folder")
        config = OmegaConf.load(file)
        model = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
        named = str(OmegaConf.select(config, "actor_rollout_ref.model.tokenizer_path") or model)
        if Path(named).is_dir():
            return Path(named)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(named, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
            story = f"the run's model {named} is neither a folder here nor in this machine's cache of models"
            raise ConfigError("--tokenizer", None, story, "name a folder with its tokenizer.json") from error
