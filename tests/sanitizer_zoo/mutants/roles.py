"""What the statements of a training script are: found by the calls they make, not by their line.

Knows PyTorch's names only; which mutation is which bug is said in `operators.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from sanitizer_zoo.mutants.source import Source

SCHEDULER_MODULES = ("lr_scheduler.", "SWALR")
DRAWS = {"next", "batch_of", "real_points"}
SHUFFLES = {"randperm", "shuffle"}


class Script(Source):
    """A script whose statements have roles."""

    @cached_property
    def schedulers(self) -> set[str]:
        """Names that hold a scheduler of the learning rate."""
        return set(self._assigned_from(*SCHEDULER_MODULES))

    @cached_property
    def optimizers(self) -> set[str]:
        """Names that hold an optimizer."""
        return set(self._assigned_from("torch.optim.")) - self.schedulers

    @cached_property
    def modules(self) -> set[str]:
        """Texts whose `.parameters()` the script asks for."""
        calls = (n for n in ast.walk(self.tree) if isinstance(n, ast.Call))
        return {
            self.segment(call.func.value)
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "parameters"
        }

    def _assigned_from(self, *parts: str) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            if any(part in self.segment(node.value.func) for part in parts):
                yield last_name(node.targets[0])

    def call_of(self, statement: ast.stmt) -> ast.Call | None:
        """The call that a statement consists of, its value used or not."""
        value = getattr(statement, "value", None)
        if isinstance(statement, (ast.Expr, ast.Assign)) and isinstance(value, ast.Call):
            return value
        return None

    def role(self, statement: ast.stmt) -> str:
        """The role of a statement in the update, or the empty text."""
        call = self.call_of(statement)
        if call is None:
            return ""
        method = last_name(call.func)
        receiver = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if method == "step":
            if receiver in self.schedulers:
                return "schedule"
            is_optimizer = receiver in self.optimizers or receiver == "scaler"
            return "update" if is_optimizer else ""
        if method in ("clip_grad_norm_", "clip_grad_value_"):
            return "clip"
        if method in ("eval", "train"):
            return method if receiver else ""
        if method in ("zero_grad", "backward", "set_epoch", "unscale_"):
            return method
        if method in ("load_state_dict", "set_rng_state", "update_bn", "add_param_group"):
            return method
        if method == "manual_seed" and self.segment(call.func) == "torch.manual_seed":
            return "seed"
        if self.segment(call.func).startswith("torch.optim.") and receiver == "optim":
            return "optimizer"
        if method in SHUFFLES:
            return "shuffle"
        return "draw" if method in DRAWS and isinstance(statement, ast.Assign) else ""

    def having(self, *roles: str) -> Iterator[ast.stmt]:
        """Statements of these roles, from top to bottom."""
        return (s for s in self.statements if self.role(s) in roles)

    def receiver(self, statement: ast.stmt) -> str:
        """The text before the last dot of the call of a statement."""
        call = self.call_of(statement)
        if call is None or not isinstance(call.func, ast.Attribute):
            return ""
        return self.segment(call.func.value)

    def trains(self, node: ast.AST) -> bool:
        """Whether updates happen inside a node, there or in a function that it calls."""
        names = self._training_functions
        for inner in ast.walk(node):
            if isinstance(inner, ast.stmt) and self.role(inner) == "update":
                return True
            if isinstance(inner, ast.Call) and last_name(inner.func) in names:
                return True
        return False

    @cached_property
    def _training_functions(self) -> set[str]:
        functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]
        known = {
            f.name
            for f in functions
            if any(isinstance(s, ast.stmt) and self.role(s) == "update" for s in ast.walk(f))
        }
        while True:
            more = {
                f.name
                for f in functions
                if any(isinstance(n, ast.Call) and last_name(n.func) in known for n in ast.walk(f))
            }
            if more <= known:
                return known
            known |= more

    def is_without_gradients(self, node: ast.AST) -> bool:
        """Whether a node stands under `no_grad` or `inference_mode`."""
        for outer in self.around(node):
            texts: list[str] = []
            if isinstance(outer, ast.With):
                texts = [self.segment(item.context_expr) for item in outer.items]
            if isinstance(outer, ast.FunctionDef):
                texts = [self.segment(decorator) for decorator in outer.decorator_list]
            if any("no_grad" in text or "inference_mode" in text for text in texts):
                return True
        return False

    def loops_around(self, node: ast.AST) -> list[ast.For]:
        """The loops around a node in its own function, the innermost first."""
        loops = []
        for outer in self.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.ClassDef)):
                break
            if isinstance(outer, ast.For):
                loops.append(outer)
        return loops


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c` and of `c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""
