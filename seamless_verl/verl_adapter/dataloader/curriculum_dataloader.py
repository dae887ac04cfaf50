"""The curriculum kernel as verl's train dataloader; it is told which groups were consumed and how accurate they are."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig
from verl.utils.dataset.rl_dataset import collate_fn

from seamless_verl.curriculum.curriculum import Draw, EpochEnded, StageEntered, configured
from seamless_verl.curriculum.prompt_pool import Outcome
from seamless_verl.curriculum_config import CurriculumConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.observe.reporter import EpochReport, PoolStanding, Reporter
from seamless_verl.verl_adapter.dataloader.streaming_buffer import StreamingReplayBuffer

# All that verl's reward managers tell of a reward that is a plain number: "acc" is that number; the others are DAPO's.
_OF_A_PLAIN_NUMBER = {"acc", "overlong", "overlong_reward"}


class CurriculumLoader:
    """Stands where verl has its ``StatefulDataLoader``: an endless iterator over batches of one prompt.

    verl names a prompt (uid) after it was fetched, so `name` is told afterwards which names the last ones got.

    Args:
        dataset: verl's train dataset; ``dataset[i]`` is a row with ``data_source``.
        on_epoch: told of every epoch that has ended.
        say: told in one line when a stage begins.
    """

    def __init__(
        self,
        dataset: Any,
        config: CurriculumConfig,
        *,
        train_batch_size: int,
        shuffle: bool,
        seed: int | None,
        on_epoch: Callable[[EpochReport], None],
        say: Callable[[str], None],
    ) -> None:
        sources = _column(dataset, "data_source")
        self._dataset = dataset
        self._accuracy_key = config.accuracy_key
        self._on_epoch = on_epoch
        self._say = say
        self._say_once = cache(say)
        self._step = 1  # the step being filled
        self.curriculum = configured(
            config,
            sources=sources,
            train_batch_size=train_batch_size,
            seed=(seed or 0) if shuffle else None,
            dataset=_fingerprint(dataset, sources),
        )
        self._unnamed: deque[Draw] = deque()
        self._draws: dict[str, Draw] = {}

    # ---------------------------------------------------------------- as verl's dataloader

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            draw = self.curriculum.draw()
            self._unnamed.append(draw)
            yield collate_fn([self._dataset[draw.prompt]])

    def state_dict(self) -> dict[str, Any]:
        """verl saves it as ``data.pt``; what counts is kept with the streaming state instead, as one piece."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `state_dict`."""

    # ---------------------------------------------------------------- as the streaming dataloader's prompt source

    def name(self, uids: Sequence[str]) -> None:
        """See `PromptSource.name`.

        Raises:
            SeamlessError: other prompts were submitted than were fetched.
        """
        if len(uids) != len(self._unnamed):
            raise SeamlessError(f"{len(uids)} prompts were submitted, {len(self._unnamed)} were fetched")
        for uid in uids:
            self._draws[uid] = self._unnamed.popleft()

    def consumed(self, keys: Mapping[str, Sequence[str]]) -> None:
        accuracies = self._accuracies(keys)
        for uid in keys:
            self._tell(self.curriculum.finish(self._draws.pop(uid), accuracies[uid]))

    def given_up(self, uids: Sequence[str]) -> None:
        """See `PromptSource.given_up`; the kernel draws them once more within their epoch."""
        for uid in uids:
            self._tell(self.curriculum.fail(self._draws.pop(uid)))

    def step_ended(self, step: int) -> None:
        """Training step ``step`` is done; a stage may end with it."""
        self._tell(self.curriculum.step_ended(step))
        self._step = step + 1

    def standing(self) -> PoolStanding:
        curriculum = self.curriculum
        return PoolStanding(
            stage=curriculum.stage,
            epochs_ended=curriculum.epochs_ended,
            pool=curriculum.pool_size,
            left=curriculum.num_left,
        )

    def _accuracies(self, keys: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
        """Per group, one accuracy per rollout; a rollout's rows all carry its reward."""
        flat = [key for group in keys.values() for key in group]
        stored = tq.kv_batch_get(keys=flat, partition_id="train", select_fields=["extra_fields"])["extra_fields"]
        rows = dict(zip(flat, stored.tolist() if hasattr(stored, "tolist") else stored, strict=True))
        return {
            uid: list({key.rsplit("_", 1)[0]: self._accuracy(rows[key]) for key in group}.values())
            for uid, group in keys.items()
        }

    def _accuracy(self, extra_fields: Mapping[str, Any]) -> float:
        name, info = self._accuracy_key, extra_fields.get("reward_extra_info") or {}
        value = info.get(name)
        if name not in info:
            problem = f"the reward of a rollout has {sorted(info) or 'nothing'} beside its score"
        elif not isinstance(value, (Real, np.bool_)) or not math.isfinite(value):
            problem = f"the reward of a rollout has {value!r} there, which is no finite number"
        elif info.keys() <= _OF_A_PLAIN_NUMBER and float(value) > 1:  # a bonus makes what is not solved look so
            problem = f"the reward is a plain number ({value}), and its score does not say what is solved"
        else:
            if info.keys() <= _OF_A_PLAIN_NUMBER and value not in (0, 1):
                self._say_once("curriculum: the reward is a plain number, of which only 1 counts as solved")
            return float(value)
        fix = f"return {{'score': …, '{name}': 1 or 0}} from the reward function, or name another that it returns"
        raise ConfigError("seamless.curriculum.accuracy_key", name, problem, fix)

    def _tell(self, events: Sequence[EpochEnded | StageEntered]) -> None:
        for event in events:
            if isinstance(event, StageEntered):
                self._say(f"curriculum: stage {event.stage} begins with epoch {event.epoch}")
                continue
            report = EpochReport(
                step=self._step,
                epoch=event.epoch,
                stage=event.stage,
                groups=sum(event.outcomes.values()),
                all_correct=event.outcomes[Outcome.ALL_CORRECT],
                all_wrong=event.outcomes[Outcome.ALL_WRONG],
                failed=event.outcomes[Outcome.FAILED],
                removed=event.removed,
                readmitted=event.readmitted,
                pool=event.pool,
            )
            self._on_epoch(report)

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        if self._unnamed:
            raise SeamlessError(f"{len(self._unnamed)} prompts were fetched and not submitted")
        draws = {uid: [draw.prompt, draw.epoch] for uid, draw in self._draws.items()}
        return {"curriculum": self.curriculum.state(), "draws": draws, "step": self._step}

    def restore(self, state: Mapping[str, Any], in_flight: Collection[str]) -> None:
        self.curriculum.restore(state["curriculum"])
        self._step = state["step"]
        self._draws = {uid: Draw(prompt=prompt, epoch=epoch) for uid, (prompt, epoch) in state["draws"].items()}
        self.given_up([uid for uid in self._draws if uid not in in_flight])


def curriculum_of(
    config: DictConfig, settings: CurriculumConfig, dataset: Any, rows: object, reporter: Reporter
) -> CurriculumLoader:
    """Builds the curriculum of a run; ``rows``, the dataloader, tells it what becomes of its prompts.

    Raises:
        ConfigError: the dataloader does not see every group.
    """
    if not isinstance(rows, StreamingReplayBuffer) or not rows.admits:
        raise ConfigError(
            "seamless.curriculum",
            "enabled",
            "needs to see every group: no custom_sampler, no staleness.policy=verl, no replayed rollouts",
            "leave those out, or the curriculum",
        )
    data = config.data
    loader = CurriculumLoader(
        dataset,
        settings,
        train_batch_size=data.train_batch_size,
        shuffle=data.shuffle,
        seed=data.get("seed"),
        on_epoch=reporter.epoch,
        say=reporter.say,
    )
    rows.follow(loader)
    return loader


def _column(dataset: Any, name: str) -> list[str]:
    """A column without building every prompt of the dataset."""
    frame = getattr(dataset, "dataframe", None)
    if frame is not None and name in getattr(frame, "column_names", ()):
        return [str(value) for value in frame[name]]
    return [str(dataset[position][name]) for position in range(len(dataset))]


def _fingerprint(dataset: Any, sources: Sequence[str]) -> str:
    """Digest of the sources and, where the data set has them, the prompts, in order."""
    digest = hashlib.blake2b(repr(list(sources)).encode(), digest_size=16)
    frame = getattr(dataset, "dataframe", None)
    key = getattr(dataset, "prompt_key", None)
    if frame is not None and key in getattr(frame, "column_names", ()):
        for prompt in frame[key]:
            digest.update(repr(prompt).encode())
    return digest.hexdigest()
