"""Every private name of torch that the library uses outside the audit, each with a reason.

A private name may be gone with the next torch. Where that would pass unseen (in the thread that
looks after other ranks) it is read in `parallel/torch_private.py`, which does without. Elsewhere an
update, a layout or a check says at once, by an AttributeError or ImportError, what is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/surefoot"
TORCH = {"torch", "dist", "nn", "F"}

FOREACH = "one kernel for a list of tensors, as torch's own optimizers and clip_grad_norm_ call it"
KIND_OF_LAYER = "the one base of its layers; torch has no public name for it"
GUARDED = "guarded in parallel/torch_private.py"
USES = {
    "dist.distributed_c10d._get_default_store": GUARDED,
    "dist.distributed_c10d._set_pg_timeout": GUARDED,
    "dist.distributed_c10d._world": GUARDED,
    "nn.modules.batchnorm._NormBase": KIND_OF_LAYER,
    "nn.modules.dropout._DropoutNd": KIND_OF_LAYER,
    "torch._amp_update_scale_": "the rule of GradScaler, without its sync",
    "torch._disable_dynamo": "torch.compiler.disable, which loads the compiler at once",
    "torch._dynamo": "its documented settings (optimize_ddp)",
    "torch._foreach_add_": FOREACH,
    "torch._foreach_copy_": FOREACH,
    "torch._foreach_mul": FOREACH,
    "torch._foreach_mul_": FOREACH,
    "torch._foreach_norm": FOREACH,
    "torch._foreach_sub": FOREACH,
    "torch.autograd._unsafe_preserve_version_counter": (
        "weights come back into tensors that the backward holds, with the values that they had"
    ),
    "torch.distributed._functional_collectives": (
        "the collectives that a compiler and an autograd graph see"
    ),
    "torch.testing._internal.distributed.fake_pg": (
        "ranks that are not there: torch tests its layouts with them"
    ),
    "torch.utils._python_dispatch": "where torch's notes on extending it import modes from",
    "torch.utils._pytree": "the walk over nested arguments that modes use",
}
"""Name to why it is used."""


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names(text: str) -> Iterator[str]:
    """Names below torch of which a part begins with an underscore, up to that part."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            is_private = any(part.startswith("_") for part in node.module.split("."))
            names = [node.module] if is_private else []
            if not is_private:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            names = [dotted(node)]
        for name in names:
            parts = name.split(".")
            if parts[0] in TORCH and any(part[0] == "_" and part[:2] != "__" for part in parts):
                yield name


def test_private_names_of_torch_are_those_with_a_reason() -> None:
    found = {
        name
        for path in SOURCE.rglob("*.py")
        if "sanitizer" not in path.parts
        for name in private_names(path.read_text(encoding="utf-8"))
    }
    assert found == set(USES)


def test_private_names_are_seen() -> None:
    text = (
        "from torch._a import b\nfrom torch.c import _d, e\nimport torch._f.g\n"
        "torch.h._i(dist.j._k)\nself._torch\ntorch.__version__\nimport os._l\n"
    )
    expected = {"torch._a", "torch.c._d", "torch._f.g", "torch.h._i", "dist.j._k"}
    assert set(private_names(text)) == expected
