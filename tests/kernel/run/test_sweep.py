"""Who ends one point of Hydra's sweep has ended the sweep, however that point ended."""

import pytest

from seamless_verl import main


@pytest.fixture
def sweep(monkeypatch):
    """Two points; ``ends`` of those that begin: the exit code, and whether the user interrupted it."""

    def run(*ends):
        left = list(ends)

        def one(config, machine, started, interrupts):
            code, is_interrupted = left.pop(0)
            interrupts += [2] * is_interrupted
            return code

        monkeypatch.setattr(main, "_run_one", one)
        monkeypatch.setattr(main.hydra, "main", lambda **_: lambda task: lambda: [task(None), task(None)])
        codes: list[int] = []
        main._run_hydra([], None, 0.0, codes, [])
        return codes

    return run


@pytest.mark.parametrize("code", [0, 1, 130])
def test_an_interrupt_ends_the_sweep_also_where_its_point_was_done_or_left_something_behind(sweep, code):
    assert sweep((code, True)) == [code]


def test_a_point_whose_trainer_was_killed_by_others_ends_itself_only(sweep):
    assert sweep((137, False), (0, False)) == [137, 0]
