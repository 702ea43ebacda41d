"""Which data, and how it is cut. Reads nothing: whether a path is there, `surefoot.data` says."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from surefoot.config.fields import Arguments, BelowOne, Section, TargetOrNone, Text, Whole
from surefoot.config.sections.parts import PART_TAG, PartSection, by_kind
from surefoot.core.doors import OURS, Door


class TextSection(Section):
    """Text files, cut into tokens and packed into sequences."""

    kind: Literal["text"]
    source: Literal["stdlib", "files"] = "stdlib"
    """The source of Python's own standard library, or the files at `path`."""
    path: Text = "none"
    """A file or folder; needed by `source: files`."""
    pattern: Text = "**/*.txt"
    """Which files of a folder."""
    encoding_errors: Literal["stop", "skip"] = "stop"
    """What to do with a file that is not UTF-8; its name is always reported."""
    vocabulary_size: Annotated[int, Field(ge=257)] = 8192
    """Tokens of the byte-level BPE vocabulary that is trained on the training part."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    documents: Literal["joined", "separate"] = "joined"
    """Whether attention may look across the border of two documents in one sequence."""
    validation_fraction: BelowOne = 0.1
    """Share of the files that is held out."""


class DigitsSection(Section):
    """The 8 x 8 handwritten digits of scikit-learn."""

    kind: Literal["digits"]
    validation_fraction: BelowOne = 0.2


class DiabetesSection(Section):
    """The diabetes regression table of scikit-learn."""

    kind: Literal["diabetes"]
    validation_fraction: BelowOne = 0.2


class ArraysSection(Section):
    """Arrays in an `.npz` file."""

    kind: Literal["arrays"]
    path: Text
    inputs: Text = "inputs"
    targets: Text = "targets"
    validation_fraction: BelowOne = 0.1


class ImageFolderSection(Section):
    """Images in one folder for each class."""

    kind: Literal["image_folder"]
    path: Text
    validation_path: Text = "none"
    """Folder of the validation images; `none` holds out a share of `path`."""
    image_size: Whole = 224
    channels: Literal[1, 3] = 3
    validation_fraction: BelowOne = 0.1


class CustomDataSection(PartSection):
    """A dataset of the user's own or of an installed package."""

    door: ClassVar[Door] = Door.SOURCES
    validation_target: TargetOrNone = "none"
    """Builds the validation set; `none` holds out a share of the dataset."""
    validation_arguments: Arguments = Field(default_factory=dict)
    validation_fraction: BelowOne = 0.1


DataSection = Annotated[
    Annotated[TextSection, Tag("text")]
    | Annotated[DigitsSection, Tag("digits")]
    | Annotated[DiabetesSection, Tag("diabetes")]
    | Annotated[ArraysSection, Tag("arrays")]
    | Annotated[ImageFolderSection, Tag("image_folder")]
    | Annotated[CustomDataSection, Tag(PART_TAG)],
    by_kind(Door.SOURCES, *OURS[Door.SOURCES]),
]
