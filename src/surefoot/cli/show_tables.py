"""The tables of `surefoot show` that need no recipe: optimizers, dtypes, this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.cli.show_parts import described
from surefoot.core.doors import Door, brought
from surefoot.observe.formatting import format_bytes


def show_optimizers(
    context: typer.Context, json_file: JsonOption = None, debug: DebugOption = False
) -> None:
    """List the optimizers, with the state that each keeps per parameter element, measured here."""
    import torch

    from surefoot.optim.ledger import ParameterLedger
    from surefoot.optim.registry import build_optimizer

    session: Session = context.obj
    model = torch.nn.Linear(64, 64)
    elements = sum(p.numel() for p in model.parameters())
    shown = table("optimizer", "state per element", "skips", "kernel here", "defaults")
    facts = []
    for section in _optimizer_sections():
        ledger = ParameterLedger.build(model, weight_decay=section.weight_decay)
        optimizer = build_optimizer(section, ledger, "cpu", skipping=False)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step(lambda: torch.tensor(True), known=True)
        kept = sum(
            value.numel()
            for state in optimizer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
        defaults = section.model_dump(exclude={"kind", "decay_rule", "decay_embeddings", "groups"})
        if type(section).model_fields["lr"].is_required():
            defaults["lr"] = "required"
        row = {
            "optimizer": section.kind,
            "values_kept_an_element": kept / elements,
            "skips": optimizer.skips.value,
            "kernel": optimizer.kernel,
            "defaults": defaults,
            "from": "surefoot",
        }
        facts.append(row)
        written = ", ".join(f"{name} {value}" for name, value in defaults.items())
        shown.add_row(
            *cells(section.kind, f"{kept / elements:g}", row["skips"], row["kernel"], written)
        )
    for entry in brought(Door.OPTIMIZERS).values():
        theirs = described(entry)
        facts.append({"optimizer": entry.name, **theirs})
        shown.add_row(*cells(entry.name, "", "", "", f"{theirs['what']} ({theirs['from']})"))
    session.console.print(shown)
    session.answer({"optimizers": facts})
    session.next(
        ("surefoot train RECIPE --set optimizer.kind=sgd --set optimizer.lr=0.1", "use one")
    )


def _optimizer_sections() -> list[Any]:
    """One section of each kind, with its defaults."""
    from surefoot.config.sections.optimizers import OptimizerSection
    from surefoot.config.sections.parts import PartSection

    sections = []
    for member in get_args(get_args(OptimizerSection)[0]):
        kind = get_args(member)[0]
        if issubclass(kind, PartSection):
            continue
        fields = kind.model_fields
        given: dict[str, object] = {"kind": get_args(fields["kind"].annotation)[0]}
        if fields["lr"].is_required():
            given["lr"] = 0.1
        sections.append(kind.model_validate(given))
    return sections


def show_formats(
    context: typer.Context, json_file: JsonOption = None, debug: DebugOption = False
) -> None:
    """List number formats: size, range, precision."""
    from surefoot.numerics.formats import number_formats

    session: Session = context.obj
    formats = number_formats()
    shown = table(
        "format", "bits", "exponent", "mantissa", "largest", "smallest", "epsilon", "trained in"
    )
    for entry in formats:
        shown.add_row(
            *cells(
                entry.name,
                f"{entry.bits:g}",
                entry.exponent_bits,
                entry.mantissa_bits,
                f"{entry.largest:.4g}",
                f"{entry.smallest_normal:.3g}",
                f"{entry.epsilon:.3g}",
                entry.trained_in,
            )
        )
    session.console.print(shown)
    session.say("\nsmallest: the smallest normal value; epsilon: from 1 to the next larger value")
    session.answer({"formats": formats})
    session.next(("surefoot show hardware", "which ones this machine supports"))


def show_hardware(
    context: typer.Context, json_file: JsonOption = None, debug: DebugOption = False
) -> None:
    """Show this machine, and what torch supports on it."""
    import platform

    import torch

    from surefoot.numerics.hardware import available_device_types, probe_hardware
    from surefoot.numerics.precision import choose_precision
    from surefoot.observe.machine import describe_machine

    session: Session = context.obj
    software = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    machine = describe_machine()
    devices: list[dict[str, Any]] = []
    for kind in available_device_types():
        chosen = choose_precision("auto", kind)
        facts = asdict(probe_hardware(kind))
        devices.append({**facts, "auto_precision": chosen.name, "because": chosen.reason})
    for name in ("cpu", "memory", "gpus", "driver"):
        software[name] = _one_line(machine[name])
    for device in devices:
        key = f"precision: auto on {device['device_type']}"
        software[key] = f"{device['auto_precision']}, {device['because']}"
    for name, value in software.items():
        session.say(f"{name}: {value}")
    shown = table("feature", "here", "because")
    features: Any = machine["features"]
    for name, feature in features.items():
        shown.add_row(*cells(name, _number(feature["supported"]), feature["reason"]))
    session.say("")
    session.console.print(shown)
    session.answer({"software": software, "machine": machine, "devices": devices})
    session.next(("surefoot train", "train on the first of these devices (device=auto)"))


def _one_line(value: object) -> str:
    if isinstance(value, Mapping):
        parts = []
        for name, item in value.items():
            is_bytes = name.endswith("_bytes") and isinstance(item, int)
            text = format_bytes(item) if is_bytes else _one_line(item)
            parts.append(f"{name.removesuffix('_bytes').replace('_', ' ')} {text}")
        return ", ".join(parts)
    if isinstance(value, list | tuple):
        return " ".join(map(_one_line, value)) or "none"
    return "unknown" if value is None else str(value)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
