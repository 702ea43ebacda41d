"""Who owns a run folder: the name that an owner leaves, and proof that it has ended.

Reads and compares; takes nothing and waits for nothing. Never compares times of two machines.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK_NAME = ".lock"
LOCK_FILE_BYTES = 1024
"""Fixed file size, so that a concurrent reader never sees half of it."""
NO_LOCKS_HERE = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "zfs"})


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds, or held, a run folder."""

    host: str
    pid: int
    started: float
    """Unix time at which the owner took the folder; for display, never compared."""
    place: str = ""
    """Boot id and pid namespace: equal text, equal meaning of a pid."""
    born: str = ""
    """Start of the process by its machine's clock; tells a reused pid apart."""
    attempt: str = ""
    """Drawn each time a folder is taken."""
    released: bool = False
    """Whether the owner released the folder itself."""

    @classmethod
    def here(cls) -> Owner:
        """This process, with a new attempt."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            pid=pid,
            started=time.time(),
            place=this_place(),
            born=birth_of(pid),
            attempt=uuid.uuid4().hex[:12],
        )

    def __str__(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host}, since {started}"

    @property
    def is_near(self) -> bool:
        """Whether its process id is meaningful on this machine."""
        return bool(self.place) and self.place == this_place()

    @property
    def has_ended(self) -> bool:
        """Whether the process of a near owner has certainly ended."""
        return not self.born or birth_of(self.pid) != self.born

    def as_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode("utf-8").ljust(LOCK_FILE_BYTES - 1) + b"\n"


def read_owner(folder: Path) -> Owner | None:
    """The last process that took the folder, alive or not; None if none is readable."""
    try:
        return Owner(**json.loads((folder / LOCK_NAME).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_in_use(folder: Path) -> bool:
    """Whether an owner holds the folder, as far as one check can tell."""
    path = folder / LOCK_NAME
    if not path.exists():
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not try_lock(descriptor, fcntl.LOCK_SH):
            return True
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            return False
        owner = read_owner(folder)
        return owner is not None and not owner.released and not (owner.is_near and owner.has_ended)
    finally:
        os.close(descriptor)
    return False


def try_lock(descriptor: int, kind: int) -> bool:
    """Takes the kernel's lock of an open file, if free.

    Raises:
        OSError: the file system supports no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_on_local_disk(path: Path) -> bool:
    """Whether only this machine's kernel uses the disk of `path`; False if unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    kinds = {line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted}
    return bool(kinds) and kinds <= LOCAL_DISKS


def this_place() -> str:
    """Boot id of this machine and, where they exist, the process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {_boot_time():.0f}"


def birth_of(pid: int) -> str:
    """Start of a process, counted from boot; empty if there is none (or a zombie)."""
    if sys.platform.startswith("linux"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        except OSError:
            return ""
        # The program name may contain spaces and parentheses: parse after the last one.
        state, *rest = fields.rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return _birth_by_psutil(pid)


def _birth_by_psutil(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return ""


def _boot_time() -> float:
    import psutil

    return psutil.boot_time()
