"""A version is there wholly or not at all, and whoever reads an old one keeps it."""

from __future__ import annotations

import fcntl
import json
import os
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.weight_store import Manifest, TensorSpec, WeightsRefused


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((3, 5), float(version))
    yield "b", torch.full((7,), version, dtype=torch.bfloat16)
    yield "c", torch.tensor(version)


def publish(folder: Path, version: int) -> Manifest:
    return weight_store.publish(folder, version, weights(version))


def test_what_is_read_is_what_was_published(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    manifest = weight_store.newest(tmp_path)
    assert manifest is not None
    manifest.check(None)
    manifest.verify()
    read = dict(manifest.tensors_of(weight_store.map_file(manifest.file)))
    for name, value in weights(3):
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)
    assert weight_store.decode(weight_store.encode(manifest)) == manifest


def test_telling_of_many_experts_holds_up_nobody() -> None:
    """Requests and engine wait meanwhile; by dataclasses.asdict it took four times as long as JSON alone."""
    told = {"dtype": "bfloat16", "shape": (768, 2048), "checksum": 2**64 - 1}
    specs = tuple(TensorSpec(name=f"experts.{number}.weight", offset=number << 20, **told) for number in range(18_432))
    manifest = Manifest(version=1, file="/dev/shm/1.weights", nbytes=1, tensors=specs)
    text = weight_store.encode(manifest)

    def fastest(work: Callable[[], object]) -> float:
        return min(timeit.repeat(work, number=1, repeat=5))

    json_alone = fastest(lambda: json.dumps(json.loads(text)))
    assert fastest(lambda: weight_store.decode(weight_store.encode(manifest))) < json_alone


def test_matrices_are_published_as_the_engine_holds_them(tmp_path: Path) -> None:
    trained = {"matrix": torch.randn(33, 9), "vector": torch.randn(33), "half": torch.randn(4, 4, dtype=torch.half)}
    manifest = weight_store.publish(tmp_path, 1, trained.items(), torch.bfloat16)
    read = dict(manifest.tensors_of(weight_store.map_file(manifest.file)))
    assert torch.equal(read["matrix"], trained["matrix"].to(torch.bfloat16))
    assert {name: value.dtype for name, value in read.items()} == {
        "matrix": torch.bfloat16,
        "vector": torch.float32,
        "half": torch.half,  # as wide as the engine's: vLLM converts it on loading
    }


@pytest.mark.parametrize(
    "name", ["mlp.gate", "mlp.router.gate", "block_sparse_moe.gate", "moe.gate", "mlp.router.classifier"]
)
def test_a_router_of_experts_is_published_as_it_was_trained(tmp_path: Path, name: str) -> None:
    """vLLM keeps that of some models in fp32."""
    trained = {
        f"model.layers.1.{name}.weight": torch.randn(4, 9),
        "model.layers.1.mlp.gate_proj.weight": torch.randn(9, 9),
    }
    manifest = weight_store.publish(tmp_path, 1, trained.items(), torch.bfloat16)
    router, other = (value for _, value in manifest.tensors_of(weight_store.map_file(manifest.file)))
    assert torch.equal(router, trained[f"model.layers.1.{name}.weight"])
    assert other.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_large_tensor_is_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    trained = {"first": torch.randn(7, 13), "turned": torch.randn(5, 3).T, "none": torch.empty(0, 2)}
    whole = weight_store.publish(tmp_path / "whole", 1, trained.items(), dtype)
    monkeypatch.setattr(weight_store, "_PIECE", 16)
    manifest = weight_store.publish(tmp_path / "pieces", 1, trained.items(), dtype)
    manifest.verify()
    assert manifest.tensors == whole.tensors
    assert Path(manifest.file).read_bytes() == Path(whole.file).read_bytes()
    read = dict(manifest.tensors_of(weight_store.map_file(manifest.file)))
    assert all(torch.equal(read[name], value.to(dtype or value.dtype)) for name, value in trained.items())


def test_only_the_newest_is_there_and_a_reader_keeps_his(tmp_path: Path) -> None:
    old = publish(tmp_path, 1)
    memory = weight_store.map_file(old.file)
    for version in range(2, 50):
        publish(tmp_path, version)
    assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["49.json", "49.weights"]
    assert dict(old.tensors_of(memory))["c"] == 1
    with pytest.raises(FileNotFoundError):
        old.check(None)


def test_a_run_that_goes_on_from_an_older_checkpoint_publishes_smaller_numbers(tmp_path: Path) -> None:
    publish(tmp_path, 9)
    publish(tmp_path, 4)
    newest = weight_store.newest(tmp_path)
    assert newest is not None
    assert newest.version == 4


def test_nobody_sees_a_publication_that_broke_off(tmp_path: Path) -> None:
    publish(tmp_path, 1)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        weight_store.publish(tmp_path, 2, broken())
    assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["1.json", "1.weights"]


@pytest.mark.parametrize("instant", ["in the bytes", "before the manifest", "in the manifest", "before the old goes"])
def test_killed_while_publishing(tmp_path: Path, instant: str) -> None:
    """What the killed trainer left is no version, or all of it; the next publication clears it away."""
    publish(tmp_path, 1)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    publish(tmp_path, 2)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    weight_store.remove(tmp_path)
    tmp_path.mkdir()
    left = {
        "in the bytes": {"2.weights.part": whole["2.weights"][:9]},
        "before the manifest": {"2.weights": whole["2.weights"]},
        "in the manifest": {"2.weights": whole["2.weights"], "2.json.part": whole["2.json"][:9]},
        "before the old goes": whole,
    }[instant]
    for name, content in {**files, **left}.items():
        (tmp_path / name).write_bytes(content)
    newest = weight_store.newest(tmp_path)
    assert newest is not None
    assert newest.version == (2 if instant == "before the old goes" else 1)
    newest.check(None)
    newest.verify()
    publish(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["3.json", "3.weights"]


def test_what_is_not_what_the_replica_has_is_refused(tmp_path: Path) -> None:
    known = publish(tmp_path, 1).tensors
    publish(tmp_path, 2).check(known)
    all_of_them = dict(weights(3))
    wrong = {
        "lacks 1 tensors .b": {name: value for name, value in all_of_them.items() if name != "b"},
        "has unknown 1 tensors .d": {**all_of_them, "d": torch.zeros(1)},
        "another shape or type of 1 tensors .a": {**all_of_them, "a": torch.zeros(5, 3)},
        "another shape or type of 1 tensors .c": {**all_of_them, "c": torch.tensor(3.0)},
    }
    for story, tensors in wrong.items():
        with pytest.raises(WeightsRefused, match=story):
            weight_store.publish(tmp_path, 3, tensors.items()).check(known)


def test_bytes_that_are_missing_or_changed_are_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 1)
    content = bytearray(Path(manifest.file).read_bytes())
    for changed, name in ((2, "a"), (57, "a"), (70, "b"), (77, "b"), (130, "c")):
        content[changed] ^= 1
        Path(manifest.file).write_bytes(content)
        with pytest.raises(WeightsRefused, match=rf"has 1 tensors \({name}, …\) whose checksums"):
            manifest.verify()
        content[changed] ^= 1
    Path(manifest.file).write_bytes(content[:-1])
    with pytest.raises(WeightsRefused, match="bytes"):
        manifest.check(None)


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    told = json.loads((tmp_path / "1.json").read_text())
    assert [each["name"] for each in told["tensors"]] == ["a", "b", "c"]


def test_a_store_that_a_killed_run_left_goes_and_one_that_a_run_holds_stays(tmp_path: Path) -> None:
    name = "seamless-weights-"
    held, left, bare, other = (tmp_path / each for each in (f"{name}held", f"{name}left", f"{name}bare", "other"))
    for folder in (held, left, other):
        publish(folder, 1)
    bare.mkdir()
    os.close(weight_store._holds.pop(left))  # as the kernel does of a killed process
    publish(tmp_path / f"{name}mine", 1)
    publish(tmp_path / f"{name}mine", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", held.name, f"{name}mine"]


def test_a_store_that_was_removed_is_held_again(tmp_path: Path) -> None:
    publish(tmp_path / "mine", 1)
    weight_store.remove(tmp_path / "mine")
    publish(tmp_path / "mine", 1)
    with (tmp_path / "mine" / "held").open() as held, pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
