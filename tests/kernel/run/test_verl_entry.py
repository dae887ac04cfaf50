"""Keys that only verl's own entry point can honour are refused with what to write instead."""

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import check_entry


def config(*, device="cuda", tool=None, steps=None, timeline=None, use_v1=True):
    return {
        "trainer": {"device": device, "use_v1": use_v1},
        "global_profiler": {"tool": tool, "steps": steps},
        "ray_kwargs": {"timeline_json_file": timeline},
    }


def test_nothing_special_is_accepted(tmp_path):
    check_entry(config())
    check_entry(config(tool="nsys"))  # no step is profiled
    check_entry(config(tool="torch", steps=[1]))
    check_entry(config(tool="nsys", steps=[1], device="cpu"))  # verl looks at it with CUDA only
    check_entry(config(timeline=str(tmp_path / "timeline.json")))


@pytest.mark.parametrize(
    ("settings", "key", "fix"),
    [
        ({"tool": "nsys", "steps": [2, 3]}, "global_profiler.tool", "trainer.v1.trainer_mode=seamless"),
        ({"use_v1": False}, "trainer.use_v1", "verl.trainer.main_ppo"),
        ({"timeline": "/no/such/folder/t.json"}, "ray_kwargs.timeline_json_file", "does not exist"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings, key, fix):
    with pytest.raises(ConfigError) as refused:
        check_entry(config(**settings))
    assert refused.value.key == key
    assert fix in str(refused.value)
