"""How far imitation alone gets: the same model and number of tokens, but a demonstrator who is never wrong.

Reinforcement learning on this task sharpens a policy that has imitated a developer who is often wrong; it does not
teach what clean demonstrations would have taught at once. So the score of clean imitation belongs beside every curve of
this recipe. It is measured once and kept here; ``python -m seamless_verl.recipes.swe.tiny.imitation`` measures it anew
(a few minutes), ``--model FOLDER`` scores a model folder in the same way, one sampled attempt of three turns per task.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

from seamless_verl.recipes.swe.tiny.sandbox import Sandbox
from seamless_verl.recipes.swe.tiny.tasks import generate

SIZES = {"held_out": 200, "held_out_templates": 60}

# `python -m seamless_verl.recipes.swe.tiny.imitation`, seed 0, one attempt per task (standard error 0.035 on each).
CLEAN_IMITATION = {"held_out": 0.440, "held_out_templates": 0.083}


def main() -> None:
    parser = argparse.ArgumentParser(description="Pass rate of clean imitation, or of a model folder.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="score this folder instead of training on clean demonstrations")
    arguments = parser.parse_args()
    for split, rate in measure(arguments.model, arguments.seed).items():
        _say(f"{split}: {rate:.3f}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def measure(folder: Path | None, seed: int) -> dict[str, float]:
    """Pass rate per validation split; trains on clean demonstrations first when no model is given."""
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from seamless_verl.recipes.swe.tiny import warm_start
    from seamless_verl.recipes.swe.tiny.offline import Player, pass_rate

    if folder is None:
        model, tokenizer = warm_start.train(warm_start.CLEAN, seed, _say)
    else:
        model = Qwen3ForCausalLM.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    sandbox = Sandbox(zygotes=2)
    try:
        player = Player(tokenizer, sandbox, seed)
        return {
            split: pass_rate(player.play(model, list(islice(generate(split, seed), size))))
            for split, size in SIZES.items()
        }
    finally:
        sandbox.close()


if __name__ == "__main__":
    main()
