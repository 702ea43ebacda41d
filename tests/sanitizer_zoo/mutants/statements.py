"""Mutations of whole statements: dropped, doubled, moved, unwrapped.

An operator knows PyTorch's calls, no script and no rule. What an edit is expected to be is decided
by the role of the edited statement. A mutation that is several kinds names them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sanitizer_zoo.mutants.mutant import Mutant, mutant_of
from sanitizer_zoo.mutants.roles import Script

# What dropping a statement of a role is.
DROPPED = {
    "zero_grad": ("missing-zero-grad",),
    "backward": ("param-no-grad", "zero-grad-before-step"),
    "update": ("optimizer-never-stepped",),
    "schedule": ("lr-never-changes",),
    "unscale_": ("clip-scaled-grads",),
    "train": ("train-in-eval-mode",),
    "update_bn": ("swa-bn-not-updated",),
    "set_epoch": ("data-set-epoch",),
    "set_rng_state": ("resume-missing-state",),
    "add_param_group": ("param-not-in-optimizer",),
    "shuffle": ("data-no-shuffle",),
}
# What saying it twice is.
DOUBLED = {
    "backward": ("double-backward",),
    "update": ("missing-zero-grad",),
    "schedule": ("sched-wrong-unit",),
}
# What moving a statement right before or after another of the same block is.
MOVED = {
    ("clip", "after", "update"): ("clip-after-step",),
    ("clip", "before", "backward"): ("clip-before-backward",),
    ("zero_grad", "after", "backward"): ("zero-grad-before-step",),
    ("zero_grad", "before", "update"): ("zero-grad-before-step",),
    ("update", "before", "backward"): ("zero-grad-before-step",),
    ("schedule", "before", "update"): ("sched-before-optim",),
    ("unscale_", "after", "clip"): ("clip-scaled-grads",),
}
# What moving a statement out of the `if` around it is.
OUT_OF_IF = {
    "zero_grad": ("after", ("accum-wiped",)),
    "clip": ("before", ("clip-per-microstep",)),
    "update": ("before", ("missing-zero-grad",)),
    "schedule": ("after", ("sched-wrong-unit", "sched-before-optim")),
}
# What moving a statement out of its innermost loop is.
OUT_OF_LOOP = {
    "zero_grad": ("before", ("missing-zero-grad",)),
    "schedule": ("after", ("sched-wrong-unit",)),
    "train": ("before", ("train-in-eval-mode",)),
    "draw": ("before", ("data-repeated-batch",)),
    "shuffle": ("before", ("data-no-shuffle",)),
}
# What moving a statement into the loop right before it is (`zero_grad`: right after it).
INTO_LOOP = {
    "zero_grad": ("inside", ("accum-wiped",)),
    "clip": ("at its end", ("clip-per-microstep",)),
    "update": ("at its end", ("missing-zero-grad",)),
    "schedule": ("at its end", ("sched-wrong-unit",)),
}


def kinds_of_evaluation(script: Script, statement: ast.stmt) -> tuple[str, ...]:
    """What a lost `eval()` is, by what it is called on."""
    receiver = script.receiver(statement)
    if "teacher" in receiver:
        return ("teacher-in-train-mode",)
    if "backbone" in receiver:
        return ("frozen-bn-drift",)
    is_frozen = f"{receiver}.requires_grad_(False)" in script.text
    return ("frozen-bn-drift", "eval-in-train-mode") if is_frozen else ("eval-in-train-mode",)


def drop(script: Script) -> Iterator[Mutant]:
    """A statement left out."""
    for statement in script.statements:
        role = script.role(statement)
        kinds = DROPPED.get(role, ())
        if role == "eval":
            kinds = kinds_of_evaluation(script, statement)
        text = script.segment(statement)
        if role == "load_state_dict":
            receivers = script.optimizers | script.schedulers
            is_state = script.receiver(statement) in receivers
            kinds = ("resume-missing-state",) if is_state else ()
        if text.startswith("nn.init.") or text.startswith("self.apply("):
            kinds = ("init-loss-off",)
        if "get_worker_info()" in text and isinstance(statement, ast.Expr):
            kinds = ("data-worker-seed",)
        if isinstance(statement, ast.Assign) and ".num_workers" in text:
            kinds = ("data-worker-duplicates",)
        if text.startswith("gradients_averaged("):
            kinds = ("ddp-grads-unsynced", "ddp-params-diverge")
        if "dist.broadcast" in text and isinstance(statement, ast.For):
            kinds = ("ddp-params-diverge",)
        is_flush = isinstance(statement, ast.If) and not script.loops_around(statement)
        if is_flush and "WINDOW" in text.splitlines()[0]:
            kinds = ("accum-tail-leak", "accum-tail-dropped")
        if kinds:
            yield mutant_of(script, "drop", statement, kinds, script.dropped(statement))


def double(script: Script) -> Iterator[Mutant]:
    """A statement said twice; a seed also once more at the start of each training loop."""
    for statement in script.having(*DOUBLED):
        kinds = DOUBLED[script.role(statement)]
        yield mutant_of(script, "double", statement, kinds, script.doubled(statement))
    for statement in script.having("seed"):
        function = script.function_of(statement)
        for loop in script.nodes(ast.For):
            if script.function_of(loop) is function and script.trains(loop):
                text = script.copied(statement, loop, "inside")
                label = f"double into the loop of line {loop.lineno}:"
                yield mutant_of(script, label, statement, ("rng-reset-in-loop",), text)


def move(script: Script) -> Iterator[Mutant]:
    """A statement moved beside another of its block."""
    for statement in script.statements:
        role = script.role(statement)
        for (moved, where, beside), kinds in MOVED.items():
            if moved != role:
                continue
            other = _partner(script, statement, beside)
            if other is not None:
                label = f"move {where} line {other.lineno}:"
                text = script.moved(statement, other, where)
                yield mutant_of(script, label, statement, kinds, text)
    for statement in script.having("eval"):
        block = script.block_of(statement)
        for other in block[block.index(statement) + 1 :]:
            if not isinstance(other, ast.Return):
                label = f"move after line {other.lineno}:"
                kinds = kinds_of_evaluation(script, statement)
                passed = block[block.index(statement) + 1 : block.index(other) + 1]
                if any(script.role(s) == "train" for s in passed):
                    kinds = (*kinds, "train-in-eval-mode")
                text = script.moved(statement, other, "after")
                yield mutant_of(script, label, statement, kinds, text)


def move_out(script: Script) -> Iterator[Mutant]:
    """A statement moved out of the `if` or the loop around it, or into a loop beside it."""
    for statement in script.statements:
        role, parent = script.role(statement), script.parents[statement]
        if isinstance(parent, ast.If) and script.loops_around(statement) and role in OUT_OF_IF:
            where, kinds = OUT_OF_IF[role]
            text = script.moved(statement, parent, where)
            yield mutant_of(script, "move out of if:", statement, kinds, text)
        loops = script.loops_around(statement)
        is_draw_of_evaluation = role == "draw" and loops and not script.trains(loops[0])
        if loops and role in OUT_OF_LOOP and not is_draw_of_evaluation:
            where, kinds = OUT_OF_LOOP[role]
            if role == "schedule" and len(loops) == 1 and script.trains(loops[0]):
                kinds = ("lr-never-changes", "sched-wrong-unit")
            text = script.moved(statement, loops[0], where)
            yield mutant_of(script, "move out of loop:", statement, kinds, text)
        if role not in INTO_LOOP:
            continue
        where, kinds = INTO_LOOP[role]
        block = script.block_of(statement)
        at = block.index(statement)
        beside = block[at + 1 :][:1] if role == "zero_grad" else reversed(block[:at])
        loop = next((s for s in beside if isinstance(s, ast.For)), None)
        if loop is not None and script.loops_around(loop):
            text = script.moved(statement, loop, where)
            yield mutant_of(script, "move into loop:", statement, kinds, text)


def move_construction(script: Script) -> Iterator[Mutant]:
    """An optimizer built earlier, a frozen part frozen later, a tie made earlier."""
    for statement in script.statements:
        block = script.block_of(statement)
        at = block.index(statement)
        freezes = isinstance(statement, ast.For) and "requires_grad = False" in script.segment(
            statement
        )
        ties = isinstance(statement, ast.Assign) and all(
            isinstance(side, ast.Attribute) and side.attr == "weight"
            for side in (statement.targets[0], statement.value)
        )
        earlier = [s for s in block[:at] if isinstance(s, (ast.Assign, ast.For))]
        later = [s for s in block[at + 1 :] if isinstance(s, (ast.Assign, ast.For))]
        later = [s for s in later if not script.trains(s)]
        if script.role(statement) == "optimizer":
            kinds = ("optimizer-stale-params", "param-not-in-optimizer")
            targets = [(other, "before", kinds) for other in earlier]
        elif freezes:
            targets = [(other, "after", ("param-frozen-by-mistake",)) for other in later]
        elif ties:
            targets = [(other, "before", ("tied-weights-broken",)) for other in earlier]
        else:
            continue
        for other, where, kinds in targets:
            label = f"move {where} line {other.lineno}:"
            text = script.moved(statement, other, where)
            yield mutant_of(script, label, statement, kinds, text)


def unwrap_no_grad(script: Script) -> Iterator[Mutant]:
    """`with torch.no_grad()` or its decorator gone."""
    for node in script.nodes(ast.With):
        assert isinstance(node, ast.With)
        texts = [script.segment(item.context_expr) for item in node.items]
        is_evaluation = _evaluates(script, script.function_of(node))
        if is_evaluation and any("no_grad" in t or "inference_mode" in t for t in texts):
            text = script.unwrapped(node)
            if len(texts) > 1:
                text = script.text.replace("with torch.no_grad(), ", "with ", 1)
            yield mutant_of(script, "unwrap", node, ("eval-with-grad",), text)
    for node in script.nodes(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list:
            kinds = ("eval-with-grad",) if _evaluates(script, node) else ()
            if "lerp_" in script.segment(node):
                kinds = ("graph-retained",)
            if kinds and "no_grad" in script.segment(decorator):
                text = script.without_decorator(node, decorator)
                yield mutant_of(script, "undecorate", node, kinds, text)


def _partner(script: Script, statement: ast.stmt, role: str) -> ast.stmt | None:
    """The statement of a role in the same block that belongs to the same update."""
    block = script.block_of(statement)
    at = block.index(statement)
    if role == "backward":
        if script.role(statement) == "zero_grad":
            own = _own_update(script, statement)
            before = block[: block.index(own)] if own is not None else block
            return next((s for s in reversed(before) if script.role(s) == role), None)
        zeroed = [n for n, s in enumerate(block[:at]) if script.role(s) == "zero_grad"]
        after = block[zeroed[-1] : at] if zeroed else block[:at]
        return next((s for s in after if script.role(s) == role), None)
    if script.role(statement) == "zero_grad":
        return _own_update(script, statement)
    if script.role(statement) == "clip" and role == "update":
        later = block[at + 1 :]
        ends = [n for n, s in enumerate(later) if script.role(s) == "backward"]
        same = [s for s in later[: ends[0] if ends else None] if script.role(s) == role]
        return same[-1] if same else None
    beside = block[:at] if role == "update" else block[at + 1 :]
    return next((s for s in reversed(beside) if script.role(s) == role), None)


def _evaluates(script: Script, function: ast.FunctionDef | None) -> bool:
    """Whether a function, or the script outside of any, calls `eval()` on a model."""
    return any(script.function_of(s) is function for s in script.having("eval"))


def _own_update(script: Script, statement: ast.stmt) -> ast.stmt | None:
    """The update of the optimizer that a `zero_grad()` is called on."""
    receiver = script.receiver(statement)
    for other in script.block_of(statement):
        call = script.call_of(other)
        if script.role(other) != "update" or call is None:
            continue
        by_scaler = [script.segment(argument) for argument in call.args]
        if receiver in (script.receiver(other), *by_scaler):
            return other
    return None
