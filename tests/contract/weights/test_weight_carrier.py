"""Published weights on another node: two nodes of Ray on this machine, each with a folder of its own for its store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError, RayTaskError

from seamless_verl.verl_adapter.weights import weight_carrier, weight_store
from seamless_verl.verl_adapter.weights.weight_carrier import Carrier, Holder, carrier_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
LARGE = 3 * (16 << 20)  # bytes: several chunks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"home": 99}})
    started.add_node(num_cpus=4, resources={"far": 99})
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


class Worker:
    """Of the trainer."""

    def publish(self, folder: str, version: int) -> None:
        weight_store.publish(Path(folder), version, weights(version))


class Server:
    """Of a replica."""

    def newest(self, carrier: Carrier, folder: str) -> tuple[Any, str]:
        manifest = carrier.newest(Path(folder))
        return manifest, "" if manifest is None else manifest.file

    def limit(self, nbytes: int) -> None:
        """No file of this process gets larger."""
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


class WaitingHolder(Holder):
    """Stops behind the first chunk while there is a file ``wait`` in its folder."""

    def content(self, file: str) -> Iterator[bytes]:
        for number, chunk in enumerate(super().content(file)):
            yield chunk
            while number == 0 and (self._folder.parent / "wait").exists():
                (self._folder.parent / "waits").touch()
                time.sleep(0.01)


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "large", torch.full((LARGE,), version % 128, dtype=torch.uint8)
    yield "small", torch.tensor([float(version)])


def on(node: str, kind: type, *args: Any, **options: Any) -> Any:
    make: Any = ray.remote(kind)
    return make.options(num_cpus=0, resources={node: 1}, **options).remote(*args)


@pytest.fixture
def trainer(cluster: Cluster, tmp_path: Path) -> Any:
    """Its first rank is on the other node than this process, as the trainer's may be."""
    worker = on("far", Worker)
    yield worker
    ray.kill(worker)


def published(trainer: Any, tmp_path: Path, version: int) -> Carrier:
    ray.get(trainer.publish.remote(str(tmp_path / "far"), version))
    carrier = carrier_of(trainer, tmp_path / "far")
    assert carrier is not None
    return carrier


def read(manifest: Any) -> dict[str, torch.Tensor]:
    manifest.check(None)
    manifest.verify()
    return dict(manifest.tensors_of(weight_store.map_file(manifest.file)))


def test_a_version_is_copied_to_another_node_once_and_mapped_where_it_was_published(
    trainer: Any, tmp_path: Path
) -> None:
    carrier = published(trainer, tmp_path, 3)
    here, there = tmp_path / "home", tmp_path / "far"
    servers = [on("home", Server) for _ in range(3)]
    told = ray.get([server.newest.remote(carrier, str(here)) for server in servers])
    assert {file for _, file in told} == {str(here / "3.weights")}
    inode = (here / "3.weights").stat().st_ino
    assert ray.get(servers[0].newest.remote(carrier, str(here)))[0] == told[0][0]
    assert (here / "3.weights").stat().st_ino == inode, "it was there"
    found = read(told[0][0])
    assert all(torch.equal(found[name], value) for name, value in weights(3))
    assert ray.get(on("far", Server).newest.remote(carrier, str(there)))[1] == str(there / "3.weights")
    ray.get(trainer.publish.remote(str(there), 4))
    assert read(ray.get(servers[1].newest.remote(carrier, str(here)))[0])["small"] == 4.0
    assert sorted(path.name for path in here.glob("[0-9]*")) == ["4.json", "4.weights"]


def test_what_an_earlier_life_of_the_run_left_on_the_node_is_not_taken(trainer: Any, tmp_path: Path) -> None:
    here = tmp_path / "home"
    weight_store.publish(here, 9, weights(1))
    weight_store.publish(tmp_path / "same", 2, weights(1))
    carrier, server = published(trainer, tmp_path, 2), on("home", Server)
    assert read(ray.get(server.newest.remote(carrier, str(here)))[0])["small"] == 2.0
    assert read(ray.get(server.newest.remote(carrier, str(tmp_path / "same")))[0])["small"] == 2.0
    assert sorted(path.name for path in here.glob("[0-9]*")) == ["2.json", "2.weights"]


def test_nothing_is_published_yet(trainer: Any, tmp_path: Path) -> None:
    carrier = carrier_of(trainer, tmp_path / "far")
    told = ray.get(on("home", Server).newest.remote(carrier, str(tmp_path / "home")))
    assert told == (None, "")


def waiting(trainer: Any, tmp_path: Path, version: int) -> Carrier:
    """A carrier that stops in the middle of each copy."""
    usual = published(trainer, tmp_path, version)
    (tmp_path / "wait").touch()
    holder = on("far", WaitingHolder, str(tmp_path / "far"), max_restarts=-1, max_concurrency=8)
    return Carrier(node=usual.node, holder=holder)


def until_it_waits(tmp_path: Path) -> None:
    while not (tmp_path / "waits").exists():
        time.sleep(0.01)


def test_a_server_that_is_killed_while_it_copies_leaves_the_next_one_free(trainer: Any, tmp_path: Path) -> None:
    carrier, here = waiting(trainer, tmp_path, 5), tmp_path / "home"
    dies, lives = on("home", Server), on("home", Server)
    lost = dies.newest.remote(carrier, str(here))
    until_it_waits(tmp_path)
    assert weight_store.newest(here) is None
    assert (here / "5.weights.part").exists()
    ray.kill(dies)
    with pytest.raises(RayActorError):
        ray.get(lost)
    (tmp_path / "wait").unlink()
    assert read(ray.get(lives.newest.remote(carrier, str(here)))[0])["small"] == 5.0
    assert sorted(path.name for path in here.glob("[0-9]*")) == ["5.json", "5.weights"]


def test_while_the_holder_is_dead_nothing_is_taken_and_afterwards_all(trainer: Any, tmp_path: Path) -> None:
    carrier, here = waiting(trainer, tmp_path, 6), tmp_path / "home"
    server = on("home", Server)
    asked = server.newest.remote(carrier, str(here))
    until_it_waits(tmp_path)
    (tmp_path / "wait").unlink()
    ray.kill(carrier.holder, no_restart=False)
    with pytest.raises(RayTaskError, match="could not copy the published weights"):
        ray.get(asked)
    assert list(here.glob("[0-9]*")) == []
    manifest = None
    while manifest is None:
        with contextlib.suppress(RayTaskError):  # it is being started again
            manifest, _ = ray.get(server.newest.remote(carrier, str(here)))
    assert read(manifest)["small"] == 6.0


def test_a_node_without_room_says_what_to_do_and_keeps_what_it_has(trainer: Any, tmp_path: Path) -> None:
    carrier, here, server = published(trainer, tmp_path, 7), tmp_path / "home", on("home", Server)
    ray.get(server.newest.remote(carrier, str(here)))
    ray.get(trainer.publish.remote(str(tmp_path / "far"), 8))
    ray.get(server.limit.remote(LARGE // 2))
    with pytest.raises(RayTaskError, match="--shm-size"):
        ray.get(server.newest.remote(carrier, str(here)))
    assert sorted(path.name for path in here.glob("[0-9]*")) == ["7.json", "7.weights"]
    (tmp_path / "far" / "8.weights").unlink()


def test_where_there_is_one_node_nobody_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_carrier.ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    assert carrier_of(None, Path("/nowhere")) is None
