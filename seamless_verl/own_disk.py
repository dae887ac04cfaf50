"""Which file systems are shared over a network, and where a file goes that must not lie on one.

SQLite's write-ahead log is shared memory in a file beside the journal and locks on it, neither of which network file
systems keep (sqlite.org/wal.html). A journal belongs to one node anyway: its proxy is started again on that node.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from seamless_verl.errors import ConfigError

JOURNAL_DIR = "seamless.proxy.journal_dir"
APART = "seamless-journal-"
"""How a folder of journals is called that is not in the run's."""
_MOUNTS = Path("/proc/self/mounts")
_OF_CLUSTERS = ("beegfs", "ceph", "gfs2", "glusterfs", "gpfs", "lustre", "ocfs2", "orangefs", "panfs", "wekafs")
_SHARED = frozenset((*_OF_CLUSTERS, "9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "vboxsf"))
# What a user-space program serves is as good as always elsewhere; these lie on the node's own disk.
_OWN_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.bindfs", "fuse.mergerfs", "fuse.ntfs-3g"))


def shared_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The kind of the network file system that ``path`` lies on; None: the node's own, or not known.

    Args:
        path: need not exist.
        mounts: as ``/proc/self/mounts``: device, mount point, kind, …
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    place = Path(os.path.realpath(path))
    kind, length = "", -1
    for line in lines:
        words = line.split()
        point = Path(_unescaped(words[1])) if len(words) > 2 else None
        # Of two mounts at one point the later hides the earlier.
        if point is not None and (point == place or point in place.parents) and len(point.parts) >= length:
            kind, length = words[2], len(point.parts)
    is_shared = kind in _SHARED or (kind.split(".")[0] == "fuse" and kind not in _OWN_FUSE)
    return kind if is_shared else None


def journal_folder(given: str | None, run_dir: Path, run: str, mounts: Path = _MOUNTS) -> Path:
    """Where the journals of this node's rollout workers go: on its own disk.

    Args:
        given: `JOURNAL_DIR`; journals of different runs may share it.
        run_dir: of the run; its folder ``proxy`` is used where it is on this node's disk.
        run: sets runs apart elsewhere.

    Raises:
        ConfigError: the folder that is given is shared, or there is none on this node's disk.
    """
    if given is not None:
        if kind := shared_file_system(Path(given), mounts):
            raise ConfigError(JOURNAL_DIR, given, _problem(kind), "name a folder on a disk that every node has itself")
        return Path(given) / f"{APART}{run}"
    if shared_file_system(run_dir, mounts) is None:
        return run_dir / "proxy"
    temporary = Path(tempfile.gettempdir())
    if kind := shared_file_system(temporary, mounts):
        problem = f"the run folder {run_dir} and {temporary} are shared ({kind}), and {_problem(kind)}"
        raise ConfigError(JOURNAL_DIR, None, problem, "name a folder on a disk that every node has itself")
    return temporary / f"{APART}{run}"


def told_of_journal(given: str | None, run_dir: Path, mounts: Path = _MOUNTS) -> str:
    """A line for people where the journals are not in the run folder; else empty.

    Raises:
        ConfigError: see `journal_folder`.
    """
    folder = journal_folder(given, run_dir, "RUN", mounts)
    if folder.parent == run_dir:
        return ""
    kind = shared_file_system(run_dir, mounts)
    because = f" (the run folder is on {kind})" if kind and given is None else ""
    key = "" if given is not None else f", or where {JOURNAL_DIR} says"
    return f"proxy journals: each node's own {folder.parent}{because}{key}"


def _problem(kind: str) -> str:
    return f"is on {kind}, where SQLite cannot keep a write-ahead log"


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)
