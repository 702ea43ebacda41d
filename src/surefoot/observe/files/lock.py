"""Who owns a run folder: the name that an owner leaves, and what proves that it has ended.

It reads and compares; it takes nothing and waits for nothing. Times of two machines are never
compared.
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
FILE_BYTES = 1024
"""The file has one size, so that a reader beside a writer never sees half of it."""
NO_LOCKS_HERE = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "zfs"})


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds, or held, a run folder."""

    host: str
    pid: int
    started: float
    """Unix time at which the owner took the folder; for people, never compared."""
    place: str = ""
    """Boot of the machine and space of process ids: the same text, the same meaning of a pid."""
    born: str = ""
    """When the process began, as its machine counts; a pid that is used again has another."""
    attempt: str = ""
    """Drawn anew each time that a folder is taken."""
    released: bool = False
    """The owner gave it back itself."""

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
        """Whether its process id means something here."""
        return bool(self.place) and self.place == this_place()

    @property
    def has_ended(self) -> bool:
        """Proof, for an owner that is near, that its process has ended."""
        return not self.born or birth_of(self.pid) != self.born

    def as_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode("utf-8").ljust(FILE_BYTES - 1) + b"\n"


def read_owner(folder: Path) -> Owner | None:
    """The last process that took the folder, alive or not; None where none is readable."""
    try:
        return Owner(**json.loads((folder / LOCK_NAME).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_in_use(folder: Path) -> bool:
    """Whether an owner holds the folder, as far as one look can tell."""
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
    """Takes the kernel's lock of an open file, if it is free.

    Raises:
        OSError: the file system knows no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_on_local_disk(path: Path) -> bool:
    """Whether one kernel alone uses the disk of `path`; False where that is not known."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    kinds = {line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted}
    return bool(kinds) and kinds <= LOCAL_DISKS


def this_place() -> str:
    """Boot of this machine and, where there are such, this process's space of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {_boot_time():.0f}"


def birth_of(pid: int) -> str:
    """When the process began, counted from the boot; empty where there is none (or a zombie)."""
    if sys.platform.startswith("linux"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        except OSError:
            return ""
        # The name of the program may hold spaces and parentheses: what follows the last one counts.
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
