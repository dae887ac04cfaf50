"""Devices are counted by their files; a journal lies on the node's own disk, wherever the run folder is."""

import tempfile

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.machine import count_accelerators, journal_folder, shared_file_system, told_of_journal


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Mount points below ``tmp_path``, each named after its kind."""
    kinds = ["nfs4", "lustre", "fuse.gcsfuse", "fuse.fuse-overlayfs", "fuseblk", "cifs", "ext4", "tmpfs", "overlay"]
    lines = ["/dev/vda / ext4 rw 0 0", "proc /proc proc rw 0 0", "malformed"]
    for kind in kinds:
        (tmp_path / f"on {kind}").mkdir()
        escaped = str(tmp_path / f"on {kind}").replace(" ", r"\040")
        lines.append(f"server:/export {escaped} {kind} rw 0 0")
    file = tmp_path / "mounts"
    file.write_text("\n".join(lines))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "on tmpfs"))
    return file


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.gcsfuse", "cifs"])
def test_network_file_systems_are_told_from_the_nodes_own(tmp_path, mounts, kind):
    assert shared_file_system(tmp_path / f"on {kind}" / "not" / "made" / "yet", mounts) == kind


@pytest.mark.parametrize("kind", ["fuse.fuse-overlayfs", "fuseblk", "ext4", "tmpfs", "overlay"])
def test_disks_and_containers_are_the_nodes_own(tmp_path, mounts, kind):
    assert shared_file_system(tmp_path / f"on {kind}", mounts) is None


def test_a_disk_below_a_network_file_system_a_link_to_one_and_a_later_mount(tmp_path, mounts):
    below = tmp_path / "on nfs4" / "scratch"
    below.mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "on lustre")
    assert shared_file_system(tmp_path / "link" / "runs", mounts) == "lustre"
    assert shared_file_system(below, mounts) == "nfs4"
    escaped = str(below).replace(" ", r"\040")
    mounts.write_text(f"{mounts.read_text()}\n/dev/vdb {escaped} xfs rw 0 0")
    assert shared_file_system(below, mounts) is None
    mounts.write_text(f"{mounts.read_text()}\nserver:/ {escaped} nfs rw 0 0")
    assert shared_file_system(below, mounts) == "nfs"


def test_the_journal_is_in_the_run_folder_if_that_is_on_a_disk(tmp_path, mounts):
    run = tmp_path / "on ext4" / "run"
    assert journal_folder(None, run, "id", mounts) == run / "proxy"
    assert told_of_journal(None, run, mounts) == ""


def test_beside_a_shared_run_folder_it_is_in_the_nodes_temporary_folder_and_people_are_told(tmp_path, mounts):
    run = tmp_path / "on nfs4" / "run"
    assert journal_folder(None, run, "id", mounts) == tmp_path / "on tmpfs" / "seamless-journal-id"
    assert told_of_journal(None, run, mounts) == (
        f"proxy journals: each node's own {tmp_path / 'on tmpfs'} (the run folder is on nfs4), "
        "or where seamless.proxy.journal_dir says"
    )


def test_a_folder_that_is_given_is_used_and_refused_where_it_is_shared(tmp_path, mounts):
    disk = tmp_path / "on ext4"
    assert journal_folder(str(disk), tmp_path / "on nfs4", "id", mounts) == disk / "seamless-journal-id"
    with pytest.raises(ConfigError, match=r"seamless\.proxy\.journal_dir=.*is on lustre, where SQLite cannot"):
        journal_folder(str(tmp_path / "on lustre"), disk, "id", mounts)


def test_where_no_disk_is_found_people_must_name_one(tmp_path, mounts, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "on cifs"))
    with pytest.raises(ConfigError, match=r"seamless\.proxy\.journal_dir=None.*are shared \(cifs\)"):
        told_of_journal(None, tmp_path / "on nfs4", mounts)


def test_accelerators_are_counted_by_their_device_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci_manager"):
        (tmp_path / name).touch()
    assert count_accelerators(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_accelerators(tmp_path) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_accelerators(tmp_path) == 0
