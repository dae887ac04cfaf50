"""Which Ray cluster a run joins: as Ray would decide in the user's environment; what cannot be joined is refused."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.run.check_machine import check_cluster, cluster_address

HERE = "203.0.113.7:6379"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def start_ray(folder, address=HERE):
    """What ``ray start --head`` leaves."""
    (folder / "ray").mkdir(parents=True)
    (folder / "ray" / "ray_current_cluster").write_text(address)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_the_cluster_of_ray_start_is_found_where_ray_looks_for_it(monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert cluster_address(None) is None
    start_ray(tmp_path / "elsewhere")
    assert cluster_address(None) == cluster_address("auto") == HERE


def test_what_is_given_goes_before_the_environment_and_that_before_the_file(monkeypatch, tmp_path):
    start_ray(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.8:1")
    assert cluster_address(None) == cluster_address("auto") == "203.0.113.8:1"
    assert cluster_address("203.0.113.9:2") == "203.0.113.9:2"
    assert cluster_address("local") is None
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert cluster_address(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster_address(None) == HERE


def test_auto_without_an_address_is_left_to_ray(tmp_path):
    assert cluster_address("auto") == "auto"
    check_cluster({"address": "auto"})


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        yield taken.getsockname()[1]


def test_a_cluster_that_is_gone_is_refused_with_the_file_that_names_it(tmp_path, closed_port):
    start_ray(tmp_path, f"127.0.0.1:{closed_port}")
    with pytest.raises(MachineError, match=rf"nothing answers at 127\.0\.0\.1:{closed_port}.*current_cluster names"):
        check_cluster({})
    check_cluster({"address": "local"})


@pytest.fixture
def cluster(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        start_ray(tmp_path, f"127.0.0.1:{server.getsockname()[1]}")
        yield server.getsockname()[1]


@pytest.fixture
def node(cluster):
    """A process with the word that Ray gives to its own (`_find_address_from_flag` of ray 2.60 looks for it)."""
    wait = "print(flush=True); input()"
    words = [sys.executable, "-c", wait, f"--gcs-address=203.0.113.7:{cluster}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.communicate(b"\n")


def test_a_cluster_that_answers_is_joined_and_settings_of_a_new_one_are_refused(node):
    check_cluster({"num_cpus": None})
    with pytest.raises(ConfigError, match=r"ray_kwargs\.ray_init\.num_cpus=96: cannot change.*address=local"):
        check_cluster({"num_cpus": 96})
    check_cluster({"num_cpus": 96, "address": "local"})


def test_a_cluster_is_joined_on_its_nodes_only(cluster):
    with pytest.raises(MachineError, match=rf"no node of the one at 127\.0\.0\.1:{cluster}.*ray start --address=127"):
        check_cluster({})


def test_rays_client_is_refused_since_the_trainer_runs_in_the_commands_process(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{cluster}")
    with pytest.raises(MachineError, match=r"ray://127\.0\.0\.1:.*RAY_ADDRESS names.*`ray job submit`"):
        check_cluster({})


def test_a_node_whose_processes_a_container_hides_is_known_by_its_socket(cluster, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as raylet:
        monkeypatch.setenv("RAY_TMPDIR", short)
        start_ray(Path(short), f"127.0.0.1:{cluster}")
        sockets = Path(short, "ray", "session_latest", "sockets")
        sockets.mkdir(parents=True)
        raylet.bind(str(sockets / "raylet"))
        with pytest.raises(MachineError, match="no node of"):
            check_cluster({})
        raylet.listen()
        check_cluster({})
