"""One name for each quantity, whatever a log calls it. Knows names only, never values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

EVALUATION = "evaluation:"


class Name(NamedTuple):
    """Where a quantity belongs (`""`: the training; `evaluation:SET`), and what it is."""

    room: str
    name: str

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, or one part of it."""
        return self.name == "loss" or self.name.startswith("loss/")


ALIASES: Mapping[str, tuple[str, ...]] = {
    "step": (
        "global_step",
        "iteration",
        "iter",
        "iters",
        "update",
        "updates",
        "num_updates",
        "trainer_global_step",
        "current_steps",
        "batch",
        "batch_idx",
    ),
    "epoch": (),
    "loss": (
        "batch_loss",
        "total_loss",
        "loss_total",
        "trainloss",
        "avg_loss",
        "loss_avg",
        "mean_loss",
        "loss_mean",
        "running_loss",
        "avg_train_loss",
        "mean_train_loss",
        "nll",
        "nll_loss",
        "ce_loss",
    ),
    "lr": ("learning_rate", "learningrate", "rate", "current_lr", "lr_0"),
    "grad_norm": ("gradient_norm", "gradnorm", "total_norm", "grad_2_0_norm_total", "gnorm"),
    "weight_norm": ("param_norm", "parameter_norm", "weights_norm", "params_norm"),
    "loss_scale": ("scale", "grad_scale", "scaler_scale", "amp_scale", "lossscale"),
    "weight": (
        "batch_size",
        "num_items",
        "num_samples",
        "items",
        "bsz",
        "batch_items",
        "batch_tokens",
        "batch_samples",
        "tokens_in_batch",
        "samples_in_batch",
        "tokens_per_batch",
        "target_tokens",
        "num_target_tokens",
    ),
    "tokens": ("num_tokens", "num_input_tokens_seen", "tokens_seen", "total_tokens"),
    "samples": ("samples_seen", "num_samples_seen"),
    "memory_bytes": (
        "memory",
        "memory_used",
        "device_memory",
        "device_memory_allocated",
        "gpu_memory_used",
        "cuda_memory_allocated",
        "gpu_memory",
        "memory_allocated",
        "gpu_memory_allocated",
        "allocated",
        "gpu_mem",
        "cuda_memory",
        "vram",
        "max_memory",
        "max_memory_allocated",
        "peak_memory",
        "bytes",
    ),
    "host_memory_bytes": (
        "host_memory",
        "cpu_memory",
        "rss",
        "ram",
        "ram_used",
        "process_memory",
        "host_rss",
    ),
    "step_seconds": ("step_time", "iter_time", "batch_time", "seconds_per_step", "time_per_step"),
    "data_seconds": ("data_time", "data_wait", "load_time", "data_loading_time", "dataloader_time"),
    "data_share": ("data_wait_share", "data_wait_fraction", "data_fraction", "dataloader_share"),
    "compute_seconds": ("compute_time", "gpu_seconds", "gpu_time", "forward_backward_seconds"),
    "bad_inputs": ("nonfinite_inputs", "non_finite_inputs", "nan_inputs", "num_nonfinite_inputs"),
    "largest_input": ("input_absmax", "input_abs_max", "input_max", "max_abs_input"),
    "device_utilization": ("gpu_util", "gpu_utilization", "utilization", "gpu_usage"),
    "num_classes": ("n_classes", "classes", "nb_classes"),
    "sample_ids": (),
    "applied": (),
    "skipped": (),
}
"""Canonical name → other names for it, already in the form that `plain_name` gives."""

_UNITS: Mapping[str, tuple[str, float]] = {
    "gb": ("bytes", 2.0**30),
    "gib": ("bytes", 2.0**30),
    "mb": ("bytes", 2.0**20),
    "mib": ("bytes", 2.0**20),
    "kb": ("bytes", 2.0**10),
    "kib": ("bytes", 2.0**10),
    "bytes": ("bytes", 1.0),
    "ms": ("seconds", 1e-3),
    "us": ("seconds", 1e-6),
    "s": ("seconds", 1.0),
    "sec": ("seconds", 1.0),
    "seconds": ("seconds", 1.0),
}
"""What a name may end in, to the unit of the canonical name and how many of it that is."""

_KNOWN = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}
_FAMILIES = {
    "lr": re.compile(r"^(?:lr|learning_rate)[_-](.+)$"),
    "grad_norm": re.compile(r"^(?:grad_norm|gradient_norm|gnorm)_(.+)$"),
    "term": re.compile(r"^terms?_(.+)$"),
    "loss": re.compile(r"^loss_(?!epoch|step|scale)(.+)$"),
}
_PART_OF_LOSS = re.compile(r"^(.+)_loss$")
_SETS = "val|valid|validation|eval|evaluation|test|dev|heldout"
_SET_BEFORE = re.compile(rf"^({_SETS})_(.+)$")
_SET_AFTER = re.compile(rf"^(.+)_({_SETS})$")
_TRAIN = re.compile(r"^(?:train|training|trn|trainer)_(.+)$|^(.+)_(?:train|training)$")
_ROOMS = re.compile(
    r"^(?:time|memory|perf|performance|optim|optimizer|(?:system_)?gpu_\d+|system|metrics)_(.+)$"
)
_NO_METRIC = re.compile(r"runtime|per_second|seconds|_time$|^time$|^steps?$|^samples?$|^epoch$")


def canonical(name: str) -> Name | None:
    """The canonical name of a column; None for one that no rule knows.

    >>> canonical("train/loss"), canonical("learning_rate"), canonical("lr-AdamW")
    (Name(room='', name='loss'), Name(room='', name='lr'), Name(room='', name='lr/adam_w'))
    >>> canonical("eval_loss"), canonical("Loss/val"), canonical("eval_runtime")
    (Name(room='evaluation:eval', name='loss'), Name(room='evaluation:val', name='loss'), None)
    """
    plain = plain_name(name)
    if found := _SET_BEFORE.match(plain):
        return _evaluation(found[1], found[2])
    if found := _SET_AFTER.match(plain):
        return _evaluation(found[2], found[1])
    if found := _TRAIN.match(plain):
        plain = found[1] or found[2]
    return _training(plain) or _training(plain.removesuffix("_step")) or _below(plain)


def in_unit(name: str) -> tuple[Name, float] | None:
    """The canonical name of a column that ends in a unit, and what a value is to be multiplied by.

    >>> in_unit("memory/allocated_gb"), in_unit("step_time_ms"), in_unit("loss_ms")
    ((Name(room='', name='memory_bytes'), 1073741824.0), (Name(room='', name='step_seconds'), \
0.001), None)
    """
    for plain in (plain_name(name), plain_name(name.lower())):  # `MiB` is one word.
        stem, _, unit = plain.rpartition("_")
        if unit in _UNITS:
            break
    else:
        return None
    measured, factor = _UNITS[unit]
    known = canonical(stem)
    fits = known is not None and not known.room and known.name.endswith(f"_{measured}")
    return (known, factor) if known is not None and fits else None


def _below(plain: str) -> Name | None:
    found = _ROOMS.match(plain)
    return _training(found[1]) if found else None


def _training(plain: str) -> Name | None:
    if plain in _KNOWN:
        return Name("", _KNOWN[plain])
    for family, pattern in _FAMILIES.items():
        if found := pattern.match(plain):
            return Name("", f"{family}/{found[1]}")
    if found := _PART_OF_LOSS.match(plain):
        return Name("", f"loss/{found[1]}")
    return None


def _evaluation(set_name: str, metric: str) -> Name | None:
    if _NO_METRIC.search(metric):
        return None
    plain = metric.removesuffix("_epoch").removesuffix("_step")
    if plain not in _KNOWN and (part := _PART_OF_LOSS.match(plain)):
        return Name(f"{EVALUATION}{set_name}", f"loss/{part[1]}")
    return Name(EVALUATION + set_name, _KNOWN.get(plain, plain))


def plain_name(name: str) -> str:
    """Lower case, words joined by `_`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")
