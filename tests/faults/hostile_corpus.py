"""Hostile checkpoints, made anew for each test: each function writes one and returns its path."""

from __future__ import annotations

import builtins
import collections
import functools
import importlib
import io
import json
import operator
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file

Build = Callable[[Path], Path]
CANARY = "canary"
GOOD = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2)}
DEEP = "[" * 100_000 + "]" * 100_000
ODD_NAMES = {
    "parent": "../outside.safetensors",
    "absolute": "/etc/hostname",
    "self": ".",
    "empty": "",
    "nul": "model\x00.safetensors",
    "nested": "a/../../outside.safetensors",
    "newline": "model\n.safetensors",
    "right to left": "model\u202e.safetensors",
    "long": "m" * 5000,
}


class Gadget:
    """Calls something while it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class FilledGadget(Gadget):
    """The same, hidden in the state of a harmless object."""

    def __reduce__(self) -> Any:
        return (collections.OrderedDict, (), {"inner": Gadget(*self.call)})


def gadgets(folder: Path) -> dict[str, Gadget]:
    """One for each way to do something; each would leave the canary, or worse."""
    canary = folder / CANARY
    touch, code = f"touch {canary}", f"open({str(canary)!r}, 'w')"
    return {
        "os.system": Gadget(os.system, touch),
        "subprocess.Popen": Gadget(subprocess.Popen, ["touch", str(canary)]),
        "subprocess.check_output": Gadget(subprocess.check_output, ["touch", str(canary)]),
        "eval": Gadget(eval, code),
        "exec": Gadget(exec, code),
        "open": Gadget(open, str(canary), "w"),
        "import": Gadget(importlib.import_module, "antigravity"),
        "runpy": Gadget(runpy.run_path, str(folder / "evil.py")),
        "rmtree": Gadget(shutil.rmtree, str(folder / "precious")),
        "unlink": Gadget(os.unlink, str(folder / "precious" / "file")),
        "partial": Gadget(functools.partial, os.system, touch),
        "methodcaller": Gadget(operator.methodcaller, "touch"),
        "getattr": Gadget(getattr, Path, "touch"),
        "type": Gadget(type, "X", (), {}),
        "new class": Gadget(types.new_class, "X"),
        "torch.load": Gadget(torch.load, str(folder / "evil.pt")),
        "torch.hub": Gadget(torch.hub.load, str(folder), "evil"),
        "kill": Gadget(os.kill, os.getpid(), 9),
        "path": Gadget(Path.touch, canary),
        "print": Gadget(builtins.print, "executed"),
        "exit": Gadget(sys.exit, 0),
    }


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def each_gadget() -> Iterator[tuple[str, Build]]:
    for name in gadgets(Path("x")):

        def build(folder: Path, name: str = name) -> Path:
            return saved(folder / "evil.pt", {**GOOD, "extra": gadgets(folder)[name]})

        yield f"gadget {name}", build


def each_place() -> Iterator[tuple[str, Build]]:
    def at(place: str, folder: Path) -> Path:
        gadget = gadgets(folder)["os.system"]
        path = folder / "evil.pt"
        hidden = {
            "top": gadget,
            "first": {"a": gadget, **GOOD},
            "optimizer": {"model": GOOD, "optimizer": {"state": [gadget]}},
            "lightning": {
                "pytorch-lightning_version": "2",
                "state_dict": GOOD,
                "hyper_parameters": gadget,
            },
            "nanogpt": {"model": GOOD, "model_args": {"x": gadget}, "iter_num": 1},
            "inside an object": {**GOOD, "x": FilledGadget(*gadget.call)},
            "list": {**GOOD, "x": [[[gadget]]]},
        }
        if place in hidden:
            return saved(path, hidden[place])
        if place == "old format":
            return saved(path, {**GOOD, "x": gadget}, _use_new_zipfile_serialization=False)
        if place == "bare pickle":
            path.write_bytes(pickle.dumps(gadget))
            return path
        if place == "old protocol":
            path.write_bytes(pickle.dumps({"x": gadget}, protocol=2))
            return path
        if place == "named as safetensors":
            return saved(folder / "model.safetensors", gadget)
        assert place == "transformers"
        (folder / "hf").mkdir()
        saved(folder / "hf" / "pytorch_model.bin", {**GOOD, "x": gadget})
        (folder / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
        return folder / "hf"

    places = ("top", "first", "optimizer", "lightning", "nanogpt", "inside an object", "list")
    more = ("old format", "bare pickle", "old protocol", "named as safetensors", "transformers")
    for place in (*places, *more):
        yield f"gadget at {place}", functools.partial(at, place)


def distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(GOOD)}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def edited(folder: Path, change: Callable[[Any, Path], Any]) -> Path:
    """A distributed checkpoint whose metadata was changed."""
    path = distributed(folder)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    made = change(metadata, folder)
    (path / ".metadata").write_bytes(pickle.dumps(metadata if made is None else made))
    return path


def first_info(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def first_tensor(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.layer.weight"]


def each_distributed() -> Iterator[tuple[str, Build]]:
    def set_path(name: str, metadata: Any, folder: Path) -> None:
        (folder / "outside.safetensors").write_bytes(b"x" * 10_000)
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", name)

    for kind, name in ODD_NAMES.items():
        change = functools.partial(set_path, name)
        yield f"distributed path {kind}", functools.partial(edited, change=change)

    def put(attribute: str, value: Callable[[Path], Any]) -> Callable[[Any, Path], None]:
        return lambda metadata, folder: setattr(metadata, attribute, value(folder))

    def huge(metadata: Any, folder: Path) -> None:
        first_tensor(metadata).size = torch.Size([10**6, 10**6])

    def negative(metadata: Any, folder: Path) -> None:
        first_tensor(metadata).size = (-1, 3)

    def chunk(**fields: Any) -> Callable[[Any, Path], None]:
        def change(metadata: Any, folder: Path) -> None:
            for name, value in fields.items():
                setattr(first_tensor(metadata).chunks[0], name, torch.Size(value))

        return change

    def twice(metadata: Any, folder: Path) -> None:
        first_tensor(metadata).chunks *= 2

    def stored(name: str, value: int) -> Callable[[Any, Path], None]:
        def change(metadata: Any, folder: Path) -> None:
            object.__setattr__(first_info(metadata), name, value)

        return change

    changes: dict[str, Callable[[Any, Path], Any]] = {
        "gadget": lambda metadata, folder: gadgets(folder)["os.system"],
        "gadget beside": put("planner_data", lambda folder: gadgets(folder)["exec"]),
        "gadget as storage": put("storage_data", lambda folder: gadgets(folder)["eval"]),
        "another class": put("planner_data", lambda folder: functools.partial(print)),
        "huge": huge,
        "negative": negative,
        "chunk outside": chunk(offsets=(5, 0)),
        "chunk of another size": chunk(sizes=(1, 1)),
        "chunk twice": twice,
        "behind the end": stored("offset", 10**12),
        "before the start": stored("offset", -5),
        "longer than the file": stored("length", 10**12),
        "no dict": put("state_dict_metadata", lambda folder: 7),
        "a list": lambda metadata, folder: [1, 2],
    }
    for name, made in changes.items():
        yield f"distributed {name}", functools.partial(edited, change=made)

    def in_chunk(folder: Path) -> Path:
        path = distributed(folder)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        buffer = io.BytesIO()
        torch.save(gadgets(folder)["os.system"], buffer)
        (path / "evil.distcp").write_bytes(buffer.getvalue())
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", "evil.distcp")
            object.__setattr__(info, "offset", 0)
            object.__setattr__(info, "length", len(buffer.getvalue()))
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return path

    def linked(folder: Path) -> Path:
        path = distributed(folder)
        shard = next(path.glob("*.distcp"))
        shard.rename(folder / "outside")
        shard.symlink_to(folder / "outside")
        return path

    def linked_metadata(folder: Path) -> Path:
        path = distributed(folder)
        (path / ".metadata").rename(folder / "outside")
        (path / ".metadata").symlink_to(folder / "outside")
        return path

    yield "distributed gadget in a chunk", in_chunk
    yield "distributed link", linked
    yield "distributed link for metadata", linked_metadata


def raw_safetensors(folder: Path, header: bytes, data: bytes = b"", length: int = -1) -> Path:
    path = folder / "model.safetensors"
    size = len(header) if length < 0 else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)
    return path


def each_safetensors() -> Iterator[tuple[str, Build]]:
    def entry(shape: Any, offsets: Any, dtype: str = "F32") -> bytes:
        return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()

    headers = {
        "huge shape": entry([10**6, 10**6], [0, 4]),
        "outside": entry([1], [10**9, 10**9 + 4]),
        "negative": entry([-1], [0, 4]),
        "backwards": entry([1], [4, 0]),
        "odd type": entry([1], [0, 4], "PICKLE"),
        "deep": DEEP.encode(),
        "twice": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        "no object": b"[1]",
        "infinite": b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
        "overflow": entry([2**62, 8], [0, 4]),
        "nul name": entry([1], [0, 4]).replace(b'"a"', b'"a\\u0000b"'),
        "control name": entry([1], [0, 4]).replace(b'"a"', b'"a\\u202eb"'),
        "empty name": entry([1], [0, 4]).replace(b'"a"', b'""'),
    }
    for name, header in headers.items():
        build = functools.partial(raw_safetensors, header=header, data=b"\0" * 4)
        yield f"safetensors {name}", build
    yield "safetensors long header", functools.partial(raw_safetensors, header=b"{}", length=2**62)
    yield "safetensors empty", functools.partial(raw_safetensors, header=b"", length=0)


def sharded(folder: Path, index: str) -> Path:
    path = folder / "hf"
    path.mkdir()
    save_file(GOOD, path / "good.safetensors")
    save_file(GOOD, folder / "outside.safetensors")
    (path / "model.safetensors.index.json").write_text(index)
    return path


def each_index() -> Iterator[tuple[str, Build]]:
    for kind, name in ODD_NAMES.items():
        index = json.dumps({"weight_map": dict.fromkeys(GOOD, name)})
        yield f"index path {kind}", functools.partial(sharded, index=index)
    whole = ", ".join(f'"{name}": "good.safetensors"' for name in GOOD)
    texts = {
        "deep": DEEP,
        "no map": "{}",
        "no text": '{"weight_map": {"a": 7}}',
        "twice": f'{{"weight_map": {{{whole}, "layer.bias": "good.safetensors"}}}}',
        "more": f'{{"weight_map": {{{whole}, "other": "good.safetensors"}}}}',
        "long number": '{"x": ' + "9" * 100_000 + "}",
    }
    for kind, text in texts.items():
        yield f"index {kind}", functools.partial(sharded, index=text)

    def linked(folder: Path) -> Path:
        path = sharded(folder, json.dumps({"weight_map": dict.fromkeys(GOOD, "link.safetensors")}))
        (path / "link.safetensors").symlink_to(folder / "outside.safetensors")
        return path

    def large(folder: Path) -> Path:
        path = sharded(folder, "{}")
        os.truncate(path / "model.safetensors.index.json", 100 << 20)
        return path

    def bad_config(folder: Path) -> Path:
        path = folder / "hf"
        path.mkdir()
        save_file(GOOD, path / "model.safetensors")
        (path / "config.json").write_text(DEEP)
        return path

    yield "index link", linked
    yield "index large", large
    yield "config deep", bad_config


def each_bomb() -> Iterator[tuple[str, Build]]:
    def rezipped(folder: Path, change: Callable[[zipfile.ZipFile], None]) -> Path:
        path = saved(folder / "evil.pt", GOOD)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
                change(archive)
        return path

    def zip_bomb(archive: zipfile.ZipFile) -> None:
        with archive.open("evil/data/999", "w", force_zip64=True) as entry:
            for _ in range(300):
                entry.write(b"\0" * (1 << 20))

    def inflated(folder: Path) -> Path:
        source = saved(folder / "source.pt", {"a": torch.zeros(50_000_000)})
        path = folder / "evil.pt"
        with (
            zipfile.ZipFile(source) as old,
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new,
        ):
            for name in old.namelist():
                new.writestr(name, old.read(name))
        source.unlink()
        return path

    def views(folder: Path) -> Path:
        base = torch.zeros(100_000)
        return saved(folder / "evil.pt", {f"a{n}": base[n:] for n in range(2000)})

    def hash_bomb(folder: Path) -> Path:
        key: Any = ()
        for _ in range(80):
            key = (key, key)
        # Pickle the parts, not the key: our own hash of it would not end either.
        body = pickle.dumps(key, protocol=2)[2:-1]
        (folder / "evil.pt").write_bytes(b"\x80\x02}" + body + b"K\x01s.")
        path = distributed(folder)
        (path / ".metadata").write_bytes((folder / "evil.pt").read_bytes())
        return path

    def memo_bomb(folder: Path) -> Path:
        path = distributed(folder)
        (path / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
        return path

    def long_text(folder: Path) -> Path:
        path = distributed(folder)
        (path / ".metadata").write_bytes(b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"abc.")
        return path

    yield (
        "expanded",
        lambda folder: saved(folder / "evil.pt", {"a": torch.zeros(1).expand(10**6, 10**6)}),
    )
    yield (
        "expanded in part",
        lambda folder: saved(folder / "evil.pt", {**GOOD, "a": torch.zeros(4, 1).expand(4, 10**9)}),
    )
    yield (
        "bytearray",
        lambda folder: saved(folder / "evil.pt", {**GOOD, "a": Gadget(bytearray, 10**13)}),
    )
    yield "zip bomb", lambda folder: rezipped(folder, zip_bomb)
    yield "inflated storage", inflated
    yield "zip parent", lambda folder: rezipped(folder, lambda z: z.writestr("../../x", b"x"))
    yield "zip absolute", lambda folder: rezipped(folder, lambda z: z.writestr("/tmp/x", b"x"))
    yield "zip twice", lambda folder: rezipped(folder, lambda z: z.writestr(z.namelist()[0], b"x"))
    yield "zip newline", lambda folder: rezipped(folder, lambda z: z.writestr("a\nb", b"x"))
    yield "many views", views
    yield "hash bomb", hash_bomb
    yield "memo bomb", memo_bomb
    yield "long text", long_text
    yield "sparse", lambda folder: saved(folder / "evil.pt", {"a": torch.ones(3).to_sparse()})
    yield (
        "meta",
        lambda folder: saved(folder / "evil.pt", {"a": torch.empty(10**6, 10**6, device="meta")}),
    )
    yield "control name", lambda folder: saved(folder / "evil.pt", {"a\x00b": torch.ones(2)})
    yield (
        "two of one name",
        lambda folder: saved(
            folder / "evil.pt", {"_orig_mod.a": torch.ones(2), "a": torch.ones(2)}
        ),
    )
    yield "number as name", lambda folder: saved(folder / "evil.pt", {7: torch.ones(2)})
    for name, data in {
        "nothing": b"",
        "zeros": b"\0" * 4096,
        "text": b"weights",
        "cut archive": b"PK\x03\x04" + b"\0" * 64,
        "cut pickle": b"\x80\x02",
        "cut safetensors": save(GOOD)[:40],
    }.items():

        def write(folder: Path, data: bytes = data) -> Path:
            (folder / "evil.pt").write_bytes(data)
            return folder / "evil.pt"

        yield f"file of {name}", write

    def linked(folder: Path) -> Path:
        saved(folder / "outside.pt", GOOD)
        (folder / "evil.pt").symlink_to(folder / "outside.pt")
        return folder / "evil.pt"

    yield "link", linked
    yield "no weights", lambda folder: saved(folder / "evil.pt", {"a": 1})


def corpus() -> dict[str, Build]:
    """All of them, by name."""
    parts = (each_gadget, each_place, each_distributed, each_safetensors, each_index, each_bomb)
    made = [pair for part in parts for pair in part()]
    assert len(made) == len(dict(made))
    return dict(made)
