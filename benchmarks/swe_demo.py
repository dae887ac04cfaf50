"""The main job against its bars: runs ``+recipe=swe`` and reads the figures from its summary.

``--run DIR`` reads a run that has already ended instead of starting one. ``--quick`` trains three steps on few tasks:
it shows that the figures are there, not that the bars hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import Record, arguments, report


def records_of(summary: dict[str, Any]) -> list[Record]:
    """The figures that the issue of the main job sets bars for."""
    gain, (low, high) = summary["held_out_pass_rate_gain"], summary["held_out_pass_rate_gain_ci"]
    audited = summary["rows_audited"] / summary["rows"]
    diff = summary["max_logprob_diff"]
    return [
        Record(name="held-out pass rate before", value=summary["held_out_pass_rate_before"], unit=""),
        Record(name="held-out pass rate after", value=summary["held_out_pass_rate_after"], unit=""),
        Record(name="held-out pass rate, gain", value=gain, unit="", bar=">= 0.10", holds=gain >= 0.10),
        Record(name="  lower end of its 95 % interval", value=low, unit="", bar="> 0", holds=low > 0),
        Record(name="  upper end", value=high, unit=""),
        Record(name="held-out templates, gain", value=summary["held_out_templates_pass_rate_gain"], unit=""),
        Record(name="share of rows audited", value=audited, unit="", bar="= 1", holds=audited == 1),
        Record(
            name="audit violations",
            value=summary["audit_violations"],
            unit="rows",
            bar="= 0",
            holds=summary["audit_violations"] == 0,
        ),
        Record(name="rollout against trainer log-probs", value=diff, unit="nats", bar="<= 1e-4", holds=diff <= 1e-4),
        Record(name="  steps with tokens to compare", value=summary["max_logprob_diff_steps"], unit="steps"),
        Record(
            name="largest staleness",
            value=summary["staleness_max"],
            unit="versions",
            bar="<= 1",
            holds=summary["staleness_max"] <= 1,
        ),
        Record(name="idle share of the trainer", value=summary["idle_share"]["trainer"], unit=""),
        Record(name="idle share of the rollout replica", value=summary["idle_share"]["rollout"], unit=""),
        Record(name="wall time of the run", value=summary["wall_s"], unit="s"),
        Record(name="until the first training step began", value=summary["time_to_first_step_s"], unit="s"),
    ]


def main() -> int:
    parsed = arguments(__doc__ or "", lambda parser: parser.add_argument("--run", type=Path, metavar="DIR"))
    if parsed.run is not None:
        return report(records_of(json.loads((parsed.run / "summary.json").read_text())), parsed.json)
    quick = ["trainer.total_training_steps=3", "data.val_max_samples=24"] if parsed.quick else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "seamless_verl.main", "+recipe=swe", *quick, f"hydra.run.dir={folder}/run"]
        subprocess.run(command, check=True)
        return report(records_of(json.loads((Path(folder) / "run" / "summary.json").read_text())), parsed.json)


if __name__ == "__main__":
    sys.exit(main())
