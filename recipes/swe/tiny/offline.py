"""Plays the tiny task without servers: batched sampling in this process, the same turns, the same sandbox.

For measuring a model (``imitation``) where a run of verl would only add time; training always goes through the real
agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from seamless_verl.recipes.swe.tiny import edit
from seamless_verl.recipes.swe.tiny.agent import describe
from seamless_verl.recipes.swe.tiny.sandbox import Sandbox, TestRun
from seamless_verl.recipes.swe.tiny.tasks import Task
from seamless_verl.recipes.swe.tiny.tokenizer import PAD_ID, TURN_END_ID, render

MAX_TURNS = 3
MAX_TOKENS = 24
_BATCH = 128


@dataclass(slots=True)
class Episode:
    """One attempt; ``ids`` is the whole conversation, ``mask`` 1 on sampled tokens, ``log_probs`` 0 elsewhere."""

    task: Task
    lines: list[str]
    run: TestRun
    unread: str
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: int = 0
    done: bool = False


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, prompts: Sequence[list[int]], generator: torch.Generator, most: int = MAX_TOKENS
) -> list[tuple[list[int], list[float]]]:
    """Tokens (the closing mark included) and their log-probabilities at temperature 1, at most so many."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: dict[int, tuple[list[int], list[float]]] = {}
    for begin in range(0, len(order), _BATCH):
        chosen = order[begin : begin + _BATCH]
        sampled = _sample_batch(model, [prompts[i] for i in chosen], generator, most)
        answers.update(zip(chosen, sampled, strict=True))
    return [answers[index] for index in range(len(prompts))]


def _sample_batch(
    model: Qwen3ForCausalLM, prompts: list[list[int]], generator: torch.Generator, most: int
) -> list[tuple[list[int], list[float]]]:
    count, width = len(prompts), max(map(len, prompts))
    ids = torch.full((count, width), PAD_ID)
    attention = torch.zeros(count, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    cache, open_rows, tokens, log_probs = DynamicCache(), torch.ones(count, dtype=torch.bool), [], []
    for _ in range(most):
        logits = model(
            input_ids=ids, attention_mask=attention, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        distribution = torch.log_softmax(logits.float(), -1)
        drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
        tokens.append(torch.where(open_rows, drawn[:, 0], -1))
        log_probs.append(distribution.gather(1, drawn)[:, 0])
        open_rows = open_rows & (drawn[:, 0] != TURN_END_ID)
        if not bool(open_rows.any()):
            break
        ids, positions = drawn, positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones(count, 1, dtype=torch.long)], 1)
    answers = []
    for row_tokens, row_log_probs in zip(
        torch.stack(tokens, 1).tolist(), torch.stack(log_probs, 1).tolist(), strict=True
    ):
        kept = [token for token in row_tokens if token >= 0]
        answers.append((kept, row_log_probs[: len(kept)]))
    return answers


class Player:
    """Plays attempts of many tasks side by side."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sandbox: Sandbox, seed: int, threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self._sandbox = sandbox
        self._generator = torch.Generator().manual_seed(seed)
        self._threads = ThreadPoolExecutor(threads)

    def play(self, model: Qwen3ForCausalLM, tasks: Sequence[Task]) -> list[Episode]:
        """One attempt per task; tests of equal tasks are run once at the start."""
        unique = {id(task): task for task in tasks}
        runs = self._threads.map(lambda task: self._run(task, list(task.source)), unique.values())
        first = dict(zip(unique, runs, strict=True))
        episodes = []
        for task in tasks:
            run = first[id(task)]
            text = render([edit.user_message(task.source, describe(run))], open_turn=True)
            episodes.append(Episode(task=task, lines=list(task.source), run=run, unread=text))
        for _ in range(MAX_TURNS):
            active = [episode for episode in episodes if not episode.done]
            if active:
                self._turn(model, active)
        return episodes

    def _turn(self, model: Qwen3ForCausalLM, episodes: list[Episode]) -> None:
        for episode in episodes:
            prompt = self._tokenizer.encode(episode.unread, add_special_tokens=False)
            episode.ids += prompt
            episode.mask += [0] * len(prompt)
            episode.log_probs += [0.0] * len(prompt)
        answers = sample(model, [episode.ids for episode in episodes], self._generator)
        for episode, (tokens, log_probs) in zip(episodes, answers, strict=True):
            episode.ids += tokens
            episode.mask += [1] * len(tokens)
            episode.log_probs += log_probs
        list(self._threads.map(self._act, episodes))

    def _act(self, episode: Episode) -> None:
        """Carry the last answer out, as the agent does."""
        episode.turns += 1
        if episode.ids[-1] != TURN_END_ID:
            episode.done = True
            return
        begin = len(episode.ids) - 1
        while episode.mask[begin - 1]:
            begin -= 1
        text = self._tokenizer.decode(episode.ids[begin:-1], skip_special_tokens=False)
        edited = edit.apply_edit(episode.lines, str(text))
        if edited is not None:
            episode.lines = edited
            episode.run = self._run(episode.task, edited)
            episode.done = episode.run.all_passed
        message = edit.user_message(episode.lines, describe(episode.run), bad_edit=edited is None)
        episode.unread = "\n" + render([message], open_turn=True)

    def _run(self, task: Task, lines: list[str]) -> TestRun:
        return self._sandbox.run(
            source_file=task.source_file,
            source="\n".join(lines) + "\n",
            test_file=task.test_file,
            tests=task.tests(),
        )


def pass_rate(episodes: Sequence[Episode]) -> float:
    passed: int = sum(episode.run.all_passed for episode in episodes)
    return passed / len(episodes)
