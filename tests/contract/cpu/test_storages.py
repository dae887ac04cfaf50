"""Memory that is given back and taken again under tensors that stay."""

from __future__ import annotations

import psutil
import pytest

torch = pytest.importorskip("torch")

from seamless_verl.verl_adapter.cpu.cpu_device import Storages  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


def held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_content_that_is_kept_comes_back_to_every_view() -> None:
    whole = torch.arange(6.0).view(2, 3)
    view, parameter = whole[1], torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.bfloat16))
    storages = Storages([whole, view, parameter])
    assert storages.nbytes == 6 * 4 + 4 * 2
    storages.give_back(keep=True)
    assert held(whole) == held(view) == held(parameter) == 0
    assert not storages.resident
    storages.take()
    assert view.tolist() == [3.0, 4.0, 5.0]
    assert parameter.tolist() == [2.0] * 4
    view.fill_(9.0)
    assert whole.tolist() == [[0.0, 1.0, 2.0], [9.0, 9.0, 9.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_content_that_was_given_up_is_not_a_number(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    storages = Storages([weight])
    storages.give_back(keep=False)
    storages.take()
    assert weight.isnan().all()


@pytest.mark.parametrize("size", [10, 4096, 100_000])
def test_a_cache_comes_back_empty_and_its_size_is_told_while_it_is_away(size: int) -> None:
    cache = torch.ones(size)
    storages = Storages([cache])
    storages.give_back(keep=False)
    assert storages.nbytes == 4 * size
    assert held(cache) == 0
    blocker = torch.ones(size)  # what the allocator may have handed on meanwhile stays as it is
    storages.take(empty=True)
    assert cache.eq(0).all()
    assert blocker.eq(1).all()


def test_the_system_has_the_memory_until_it_is_written_to_again() -> None:
    process, mib = psutil.Process(), 1 << 20
    cache = torch.ones(64 * mib, dtype=torch.uint8)
    storages, full = Storages([cache]), process.memory_info().rss
    storages.give_back(keep=False)
    assert full - process.memory_info().rss > 56 * mib
    storages.take(empty=True)
    assert full - process.memory_info().rss > 56 * mib
    cache.fill_(1)
    assert abs(full - process.memory_info().rss) < 8 * mib


def test_what_belongs_to_others_is_left_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weights = Storages([weight])
    buffers = Storages([weight.data, torch.zeros(1)], besides=weights)
    assert buffers.nbytes == 4
    buffers.give_back(keep=True)
    assert held(weight) == 12


def test_giving_back_or_taking_twice_changes_nothing() -> None:
    weight = torch.ones(3)
    storages = Storages([weight])
    storages.take()
    assert weight.tolist() == [1.0] * 3
    storages.give_back(keep=True)
    storages.give_back(keep=False)
    storages.take()
    assert weight.tolist() == [1.0] * 3
