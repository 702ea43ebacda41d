"""Image folders with one sub-folder per class.

Reads, resizes and scales; random augmentation is added around it. Files that are not images are
listed as skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from surefoot.core.errors import DataError, MissingDataError, RequestError
from surefoot.data.sources.base import DataSplits

_EXTENSIONS = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
# Up to this size a folder is hashed completely; beyond it, names, sizes and the head of each file.
_WHOLE_BYTES = 1 << 30
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One image and its class."""

    path: Path
    name: str
    """Path below the folder, with forward slashes."""
    label: int


class ImageFolderSource:
    """Images of a folder as (image float32 [C, S, S], label int).

    The shorter side is resized to S (bilinear) and the center is cropped. A pixel v of 0..255
    becomes (v / 255 - 0.5) / 0.5.

    Args:
        files: the images.
        classes: name of each label.
        image_size: S.
        channels: 1 for gray, 3 for colour.
        name: used in messages.
    """

    is_random = False

    def __init__(
        self,
        files: Sequence[ImageFile],
        classes: Sequence[str],
        *,
        image_size: int = 224,
        channels: Literal[1, 3] = 3,
        name: str = "images",
    ) -> None:
        self.files = tuple(files)
        self.classes = tuple(classes)
        self.name = name
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        return _read(file.path, self.image_size, self.channels), file.label

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Images [B, C, S, S] and labels int64 [B]."""
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels, dtype=torch.int64)

    def locate(self, index: int) -> str:
        """The file of a sample."""
        return str(self.files[index].path)

    def fingerprint(self) -> str:
        """Hash of names, labels and content; above 1 GiB in total, of each file's size and head."""
        total = sum(file.path.stat().st_size for file in self.files)
        digest = hashlib.blake2b(f"{self.image_size} {self.channels}".encode(), digest_size=16)
        for file in self.files:
            size = file.path.stat().st_size
            digest.update(f"{file.name}\0{file.label} {size}\0".encode("utf-8", "surrogateescape"))
            with open(file.path, "rb") as content:
                digest.update(content.read(-1 if total <= _WHOLE_BYTES else _HEAD_BYTES))
        return f"{'content' if total <= _WHOLE_BYTES else 'heads'}:{digest.hexdigest()}"


def open_image_folder(
    path: Path | str,
    *,
    validation_path: Path | str | None = None,
    image_size: int = 224,
    channels: Literal[1, 3] = 3,
    validation_fraction: float = 0.1,
) -> DataSplits:
    """Opens a folder of class folders; classes are numbered in name order.

    Args:
        path: contains one folder per class.
        validation_path: a separate such folder for validation. Without it, images whose path hash
            is below `validation_fraction` are held out: an image never changes sides.
        image_size: height and width of an image.
        channels: 1 or 3.
        validation_fraction: share of images held out.

    Raises:
        MissingDataError: the folder is missing or has no class or no image; or Pillow is not
            installed.
        DataError: the validation folder has other classes.
        RequestError: the fraction is not in [0, 1).
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise RequestError(
            f"validation_fraction is {validation_fraction}",
            where="data.validation_fraction",
            rule="0 <= validation_fraction < 1",
        )
    _pillow()
    files, classes, skipped = _scan(Path(path).expanduser(), "data.path")
    if validation_path is not None:
        root = Path(validation_path).expanduser()
        held_out, other, more = _scan(root, "data.validation_path")
        skipped += more
        if other != classes:
            difference = sorted(set(classes) ^ set(other))
            raise DataError(
                f"{validation_path} has other classes than {path}: {', '.join(difference[:8])}",
                where="data.validation_path",
                rule="both folders have the same class folders",
            )
        train, rule = files, f"the images of {root.name}"
    else:
        train = [file for file in files if _place(file.name) >= validation_fraction]
        held_out = [file for file in files if _place(file.name) < validation_fraction]
        rule = f"images whose path hashes below {validation_fraction:g}"
        if not train:
            raise DataError(
                f"no image of {path} is left for training",
                where="data.validation_fraction",
                rule=rule + " are held out",
                remedy="lower data.validation_fraction, or give data.validation_path",
            )

    def part(chosen: list[ImageFile], label: str) -> ImageFolderSource:
        name = f"{Path(path).name} {label}"
        return ImageFolderSource(
            chosen, classes, image_size=image_size, channels=channels, name=name
        )

    sizes = {
        "in_channels": channels,
        "num_classes": len(classes),
        "in_features": channels * image_size**2,
        "out_features": len(classes),
    }
    facts = {
        "source": Path(path).name,
        "split_rule": rule,
        "classes": classes,
        "train": {"images": len(train)},
        "validation": {"images": len(held_out)},
        "skipped": skipped,
    }
    validation = {"validation": part(held_out, "validation")} if held_out else {}
    return DataSplits(part(train, "train"), validation, sizes, facts)


def _scan(root: Path, key: str) -> tuple[list[ImageFile], list[str], list[dict[str, str]]]:
    if not root.is_dir():
        raise MissingDataError(
            f"the folder {root} does not exist",
            where=key,
            rule=f"{key} names a folder with one folder per class",
            remedy=f"relative paths are resolved from the working directory, {Path.cwd()}",
        )
    folders = sorted(
        entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not folders:
        raise MissingDataError(
            f"{root} has no class folder",
            where=key,
            rule="images are in one folder per class",
            remedy="move them into folders that are named for their classes",
        )
    skipped = [
        {"name": entry.name, "reason": "in no class folder"}
        for entry in sorted(root.iterdir())
        if entry.is_file() and not entry.name.startswith(".")
    ]
    files: list[ImageFile] = []
    for label, folder in enumerate(folders):
        before = len(files)
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(root).as_posix()
            if file.name.startswith(".") or not file.is_file():
                continue
            if file.suffix.lower() in _EXTENSIONS:
                files.append(ImageFile(file, name, label))
            else:
                skipped.append({"name": name, "reason": "no image by its name"})
        if len(files) == before:
            raise MissingDataError(
                f"the class folder {folder} has no image",
                where=key,
                rule=f"an image ends with {', '.join(sorted(_EXTENSIONS))}",
                remedy="add images, or remove the folder",
            )
    return files, [folder.name for folder in folders], skipped


def _place(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDataError(
            "an image folder needs Pillow, which is not installed",
            where="data.kind",
            rule="images are read with Pillow",
            remedy="pip install 'surefoot[vision]'",
        ) from error
    return Image


def _read(path: Path, size: int, channels: int) -> Tensor:
    pillow = _pillow()
    try:
        with pillow.open(path) as opened:
            image = opened.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(
            f"{path} is not a readable image: {error}",
            where=str(path),
            rule="every image of the folder can be read",
            remedy="replace or remove the file",
        ) from error
    width, height = image.size
    scale = size / min(width, height)
    width, height = max(size, round(width * scale)), max(size, round(height * scale))
    image = image.resize((width, height), pillow.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    pixels = np.asarray(image, dtype=np.float32).reshape(size, size, channels)
    return torch.from_numpy(
        (pixels / np.float32(127.5) - np.float32(1.0)).transpose(2, 0, 1).copy()
    )
