"""Data sections. Reads nothing: `surefoot.data` checks whether a path exists."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from surefoot.config.fields import Arguments, BelowOne, Section, TargetOrNone, Text, Whole
from surefoot.config.sections.parts import PART_TAG, PartSection, by_kind
from surefoot.core.doors import OURS, Door


class TextSection(Section):
    """Text files, tokenized and packed into sequences."""

    kind: Literal["text"]
    source: Literal["stdlib", "files"] = "stdlib"
    """The source of Python's standard library, or the files at `path`."""
    path: Text = "none"
    """A file or folder; required by `source: files`."""
    pattern: Text = "**/*.txt"
    """Glob pattern of the files in a folder."""
    encoding_errors: Literal["stop", "skip"] = "stop"
    """Stop at a file that is not UTF-8, or skip it; its name is always reported."""
    vocabulary_size: Annotated[int, Field(ge=257)] = 8192
    """Largest number of tokens of the BPE vocabulary, trained on the training part."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    documents: Literal["joined", "separate"] = "joined"
    """Whether attention crosses document boundaries within a sequence."""
    validation_fraction: BelowOne = 0.1
    """Share of the files held out for validation."""


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
    """Images in one folder per class."""

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
