"""Sandboxed reader of a foreign checkpoint: bounded memory, no network, no subprocess.

Main of a separate process. Started for one file or folder, it writes the weights as
safetensors and a JSON report into one folder, and ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from surefoot.state.distributed_files import (
    METADATA_NAME,
    inside,
    read_distributed,
    refuse_expanded,
)
from surefoot.state.recognition import Found, as_our_gpt, find_weights, without_wrappers

WEIGHTS_NAME = "weights.safetensors"
REPORT_NAME = "report.json"
MAX_JSON_BYTES = 64 << 20
SLACK_BYTES = 1 << 20
SPARE_ADDRESS_BYTES = 256 << 20
HARMLESS_MODULES = (
    "argparse",
    "collections",
    "datetime",
    "enum",
    "lightning",
    "lightning_fabric",
    "numpy",
    "omegaconf",
    "pathlib",
    "pytorch_lightning",
    "torchmetrics",
    "typing",
)
"""Modules whose objects occur in checkpoints; each is read as an inert stand-in."""
FORBIDDEN = (
    "ctypes.",
    "ftplib.",
    "http.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "pty.",
    "shutil.",
    "smtplib.",
    "socket.",
    "subprocess.",
    "urllib.",
    "webbrowser.",
)


class StandIn:
    """Replaces an object that is not a tensor: keeps its arguments and does nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def main() -> None:
    """Reads `argv[1]` into the folder `argv[2]`, with limits for a source of `argv[3]` bytes."""
    source, out, size, seconds = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    _limit(size, seconds)
    _install_audit_hook(out)
    report: dict[str, Any]
    try:
        found = read_source(source, 2 * size + SLACK_BYTES)
        save_file(_separate(found.weights), out / WEIGHTS_NAME, {"format": "pt"})
        report = {
            "kind": found.kind,
            "left_out": found.left_out,
            "notes": found.notes,
            "model": found.model,
            "tensors": len(found.weights),
            "elements": sum(tensor.numel() for tensor in found.weights.values()),
        }
    except MemoryError:
        report = {"error": "it needs more memory than its size allows"}
    except Exception as error:
        text = str(error) or type(error).__name__
        report = {"error": text if len(text) < 1000 else f"{text[:1000]} …"}
    (out / REPORT_NAME).write_text(json.dumps(report), encoding="utf-8")


def _limit(size: int, seconds: int) -> None:
    torch.set_num_threads(1)
    statistics = Path("/proc/self/statm")
    # If the address space in use is unknown (macOS), no limit can be computed.
    if statistics.exists():
        used = int(statistics.read_text("ascii").split()[0]) * resource.getpagesize()
        most = used + 5 * size + SPARE_ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    largest = 3 * size + 16 * SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _install_audit_hook(out: Path) -> None:
    """From here on Python refuses every operation that a reader does not need."""
    allowed = os.path.join(os.path.realpath(out), "")

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"reading the checkpoint tried {event}")
        if event == "open" and isinstance(arguments[0], str) and _writes(arguments):
            path = os.path.join(os.path.realpath(os.path.dirname(arguments[0])), "")
            if not path.startswith(allowed):
                raise PermissionError(f"reading a checkpoint would write {arguments[0]}")

    sys.addaudithook(refuse)


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def read_source(path: Path, most_bytes: int) -> Found:
    """The weights of a file or folder of any known form.

    Raises:
        Exception: it is malformed, of an unknown form, or declares more than `most_bytes`.
    """
    if path.is_symlink():
        raise ValueError("it is a link; name the file itself")
    found = _read_folder(path, most_bytes) if path.is_dir() else _read_file(path, most_bytes)
    _refuse_bombs(found.weights, most_bytes)
    without_wrappers(found)
    return found


def _read_folder(folder: Path, most_bytes: int) -> Found:
    if (folder / METADATA_NAME).exists():
        inside(folder, METADATA_NAME)
        tensors, others = read_distributed(folder, most_bytes)
        return _of_distributed(tensors, others)
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            return _with_config(folder, _read_index(inside(folder, name), most_bytes))
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return _with_config(folder, _read_file(inside(folder, name), most_bytes))
    raise ValueError(
        "the folder has no known weights file: .metadata, model.safetensors, "
        "pytorch_model.bin or index of shards"
    )


def _of_distributed(tensors: dict[str, Tensor], others: list[str]) -> Found:
    prefixes = {name.partition(".")[0] for name in tensors}
    found = Found("distributed checkpoint", tensors, others)
    for prefix in ("model", "state_dict", "app"):
        if prefix in prefixes and len(prefixes) > 1:
            found.left_out += [n for n in tensors if not n.startswith(f"{prefix}.")]
            prefixes = {prefix}
        if prefixes == {prefix}:
            found.weights = {
                name.removeprefix(f"{prefix}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{prefix}.")
            }
            break
    return found


def _with_config(folder: Path, found: Found) -> Found:
    found.kind = f"transformers folder, {found.kind}"
    if (folder / "config.json").exists():
        as_our_gpt(found, read_json(inside(folder, "config.json")))
    return found


def _read_index(path: Path, most_bytes: int) -> Found:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ValueError("the index has no weight_map")
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        shard = _read_file(inside(path.parent, str(name)), most_bytes)
        if twice := sorted(tensors.keys() & shard.weights.keys()):
            raise ValueError(f"two shards hold {twice[0]!r}")
        tensors |= shard.weights
        _refuse_bombs(tensors, most_bytes)
    if tensors.keys() != weight_map.keys():
        odd = sorted(tensors.keys() ^ weight_map.keys())
        raise ValueError(f"the index and its shards differ in {odd[0]!r}")
    return Found("sharded safetensors", tensors)


def _read_file(path: Path, most_bytes: int) -> Found:
    if path.name.endswith(".index.json"):
        return _read_index(path, most_bytes)
    with path.open("rb") as file:
        head = file.read(16)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return Found("safetensors", _read_safetensors(path))
    if head.startswith(b"PK"):
        _check_archive(path, most_bytes)
    elif not head.startswith(b"\x80"):
        raise ValueError("it is neither safetensors nor a file of torch.save")
    return find_weights(_load_pickle(path))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    length = int.from_bytes(path.open("rb").read(8), "little")
    if length > min(path.stat().st_size - 8, MAX_JSON_BYTES):
        raise ValueError("its header is longer than the file")
    with path.open("rb") as file:
        file.seek(8)
        _parse_json(file.read(length))
    with safe_open(path, framework="pt", device="cpu") as opened:
        names = list(opened.keys())
        if odd := [name for name in names if not name or not name.isprintable()]:
            raise ValueError(f"a tensor is named {odd[0]!r}")
        return {name: opened.get_tensor(name) for name in names}


def _check_archive(path: Path, most_bytes: int) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(names) != len(set(names)):
        raise ValueError("the archive holds two entries of one name")
    for entry in entries:
        parts = Path(entry.filename).parts
        if ".." in parts or entry.filename.startswith("/") or not entry.filename.isprintable():
            raise ValueError(f"the archive holds an entry named {entry.filename!r}")
    if sum(entry.file_size for entry in entries) > most_bytes:
        raise ValueError("the archive unpacks to more than its size allows")


def _load_pickle(path: Path) -> Any:
    unknown = _unsafe_names(path)
    hostile = [name for name in unknown if name.partition(".")[0] not in HARMLESS_MODULES]
    if hostile:
        raise ValueError(f"it would run {hostile[0]}; nothing of it was run")
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (type(name, (StandIn,), {}), name) for name in unknown
    ]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True)


def _unsafe_names(path: Path) -> list[str]:
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if not is_archive:
        # The old format: torch refuses by name whatever is not known to be safe.
        return []
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size without duplicate names.

    Raises:
        ValueError: it is none.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} is too large")
    return _parse_json(path.read_bytes())


def _parse_json(data: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name appears twice in its JSON")
        return made

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("its JSON is not an object")
    return value


def _refuse_bombs(tensors: Mapping[str, Tensor], most_bytes: int) -> None:
    total = 0
    for name, tensor in tensors.items():
        refuse_expanded(repr(name), tensor)
        total += tensor.numel() * tensor.element_size()
    if total > most_bytes:
        raise ValueError("its tensors declare more elements than it stores")


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with separate storage, as safetensors requires."""
    seen: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        pointer = whole.untyped_storage().data_ptr()
        alone = whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
        made[name] = whole if alone and pointer not in seen else whole.clone()
        seen.add(pointer)
    return made


if __name__ == "__main__":
    main()
