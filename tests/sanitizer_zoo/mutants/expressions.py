"""Mutations within a statement: a call, a keyword, an operand, a slice or a name changed.

An operator knows PyTorch's calls, no script and no rule; the label follows from what was edited.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from sanitizer_zoo.mutants.mutant import Mutant, mutant_of
from sanitizer_zoo.mutants.roles import Script, last_name
from sanitizer_zoo.mutants.statements import kinds_of_evaluation


def drop_method(script: Script) -> Iterator[Mutant]:
    """One call of a chain left out: `.detach()`, `.item()`, `.squeeze()`, `.nan_to_num()`."""
    for node in script.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Attribute):
            continue
        method, statement = node.func.attr, script.statement_of(node)
        has_graph = not script.is_without_gradients(node)
        kinds: tuple[str, ...] = ()
        if method == "detach" and has_graph:
            kinds = (
                ("graph-retained",) if _collects(script, statement) else ("target-not-detached",)
            )
        elif method == "item" and has_graph and last_name(node.func.value).startswith("loss"):
            kinds = ("graph-retained",)
        elif method == "squeeze":
            kinds = ("loss-broadcast",)
        elif method == "nan_to_num":
            kinds = ("data-nan",)
        if kinds:
            text = script.replaced(node, script.segment(node.func.value))
            yield mutant_of(script, f"drop .{method}() in", statement, kinds, text)


def drop_call(script: Script) -> Iterator[Mutant]:
    """A call replaced by its first argument: `F.log_softmax(x)` by `x`, `ModuleList([...])`."""
    labels = {
        "ModuleList": ("unregistered-submodule", "param-not-in-optimizer"),
        "ModuleDict": ("unregistered-submodule", "param-not-in-optimizer"),
        "log_softmax": ("nll-on-logits", "kl-div-input-not-log"),
    }
    for node in script.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = last_name(node.func)
        if name in labels:
            kinds = labels[name] if "kl_div" not in script.text else labels[name][::-1]
            text = script.replaced(node, script.segment(node.args[0]))
            yield mutant_of(script, f"unwrap {name} in", node, kinds, text)
        if script.segment(node) == "scaler.scale(loss)":
            text = script.replaced(node, "loss")
            yield mutant_of(script, "unwrap scale in", node, ("fp16-no-scaler",), text)


def drop_keyword(script: Script) -> Iterator[Mutant]:
    """A keyword argument, or an entry of a parameter group, left out."""
    labels = {
        "ignore_index": ("loss-includes-padding",),
        "training": ("dropout-in-eval",),
        "attn_mask": ("lm-not-causal",),
        "worker_init_fn": ("data-worker-seed",),
        "sampler": ("data-no-shuffle", "ddp-duplicate-data"),
        "weight_decay": ("decay-norm-bias",),
        "reduction": ("accum-token-mean", "accum-no-scale"),
    }
    for node in script.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        for keyword in node.keywords:
            name, value = keyword.arg or "", script.segment(keyword.value)
            if name == "weight_decay" and float(value or 1) != 0:
                continue
            if name == "reduction" and (value != '"sum"' or script.is_without_gradients(node)):
                continue
            if name in labels:
                kinds = labels[name]
                if name == "sampler" and "DistributedDataParallel" in script.text:
                    kinds = kinds[::-1]
                text = script.without_keyword(node, name)
                yield mutant_of(script, f"drop {name} of", node, kinds, text)
    for node in script.nodes(ast.Dict):
        assert isinstance(node, ast.Dict)
        for key, entry in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else ""
            if name == "weight_decay" and script.segment(entry) == "0.0":
                text = script.without_entry(node, name)
                kinds = labels[name]
                if "embed" in script.segment(node):
                    kinds = ("frozen-decayed",)
                yield mutant_of(script, "drop weight_decay of", node, kinds, text)


def flip(script: Script) -> Iterator[Mutant]:
    """A boolean turned round: a keyword argument or the default of a parameter."""
    labels = {
        "shuffle": ("data-no-shuffle",),
        "drop_last": ("bn-batch-of-one",),
        "is_causal": ("lm-not-causal",),
        "enabled": ("fp16-no-scaler",),
        "probabilities": ("softmax-before-ce",),
        "freeze_backbone": ("frozen-bn-drift",),
    }
    for node in script.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        for keyword in node.keywords:
            if script.segment(keyword.value) == "True" and keyword.arg in labels:
                text = script.replaced(keyword.value, "False")
                yield mutant_of(script, f"flip {keyword.arg} of", node, labels[keyword.arg], text)
    for node in script.nodes(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        for argument, default in zip(arguments, node.args.defaults, strict=True):
            if script.segment(default) == "False" and argument.arg in labels:
                text = script.replaced(default, "True")
                yield mutant_of(script, f"flip {argument.arg} of", node, labels[argument.arg], text)
    for node in script.nodes(ast.IfExp):
        assert isinstance(node, ast.IfExp)
        if "no_sync" in script.segment(node):
            kinds = ("ddp-no-sync-misuse", "ddp-grads-unsynced")
            negated = script.replaced(node.test, f"not {script.segment(node.test)}")
            yield mutant_of(script, "negate", node, kinds, negated)
            always = script.replaced(node, script.segment(node.orelse))
            yield mutant_of(script, "always otherwise in", node, kinds, always)


def sibling(script: Script) -> Iterator[Mutant]:
    """A function replaced by one of the same signature, a type by one of its kind."""
    labels = {
        "AdamW": ("Adam", ("adam-l2",)),
        "log_softmax": ("softmax", ("nll-on-logits", "kl-div-input-not-log")),
        "binary_cross_entropy": (
            "binary_cross_entropy_with_logits",
            ("sigmoid-before-bcelogits",),
        ),
        "float32": ("bfloat16", ("low-precision-update-lost",)),
    }
    for node in script.nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr in labels and script.segment(node.value) != "np":
            other, kinds = labels[node.attr]
            kinds = kinds if "kl_div" not in script.text else kinds[::-1]
            text = script.replaced(node, f"{script.segment(node.value)}.{other}")
            yield mutant_of(script, f"{node.attr} becomes {other} in", node, kinds, text)
    for statement in script.having("eval", "train"):
        call = script.call_of(statement)
        assert call is not None
        role, receiver = script.role(statement), script.receiver(statement)
        other = {"eval": "train", "train": "eval"}[role]
        kinds = ("train-in-eval-mode",)
        if role == "eval":
            kinds = kinds_of_evaluation(script, statement)
        text = script.replaced(call, f"{receiver}.{other}()")
        yield mutant_of(script, f"{role} becomes {other} in", statement, kinds, text)
    for statement in script.having("update"):
        call = script.call_of(statement)
        if call is not None and script.receiver(statement) == "scaler":
            text = script.replaced(call, f"{script.segment(call.args[0])}.step()")
            yield mutant_of(script, "past the scaler:", statement, ("scaler-bypassed",), text)


def drop_operand(script: Script) -> Iterator[Mutant]:
    """One operand of an operation left out."""
    for node in script.nodes(ast.BinOp):
        assert isinstance(node, ast.BinOp)
        statement = script.statement_of(node)
        left, right = script.segment(node.left), script.segment(node.right)
        kept: list[tuple[str, tuple[str, ...]]] = []
        if isinstance(node.op, ast.Div) and right in ("window", "ACCUMULATION"):
            kept = [(left, ("accum-no-scale",))]
        if isinstance(node.op, ast.Mult) and _is_horizon(script, node):
            kept = [(left, ("sched-wrong-unit",)), (right, ("sched-wrong-unit",))]
        if isinstance(node.op, ast.Add) and right == "EPSILON":
            kept = [(left, ("data-nan",))]
        if isinstance(node.op, ast.Add) and left.startswith("list("):
            kept = [(left, ("param-not-in-optimizer",)), (right, ("param-not-in-optimizer",))]
        is_root = script.role(statement) == "backward"
        if is_root and isinstance(node.op, ast.Add) and "loss" in left + right:
            kept = [(left, ("param-no-grad",)), (right, ("param-no-grad",))]
        for text, kinds in kept:
            edited = script.replaced(node, text)
            yield mutant_of(script, f"only {text} in", statement, kinds, edited)
    for node in script.nodes(ast.BoolOp):
        assert isinstance(node, ast.BoolOp)
        if isinstance(node.op, ast.Or) and "ACCUMULATION" in script.segment(node):
            edited = script.replaced(node, script.segment(node.values[0]))
            kinds = ("accum-tail-dropped", "accum-tail-leak")
            yield mutant_of(script, "only the first condition of", node, kinds, edited)


def arithmetic(script: Script) -> Iterator[Mutant]:
    """`/` of a schedule becomes `//`; a slice or a diagonal is off by one."""
    for node in script.nodes(ast.BinOp):
        assert isinstance(node, ast.BinOp)
        function = script.function_of(node)
        if function is None or function.name not in ("rate", "factor"):
            continue
        if isinstance(node.op, ast.Div):
            edited = script.replaced(
                node, f"({script.segment(node.left)}) // ({script.segment(node.right)})"
            )
            yield mutant_of(script, "floor division in", node, ("lr-zero",), edited)
    for node in script.nodes(ast.keyword):
        assert isinstance(node, ast.keyword)
        if node.arg == "diagonal":
            edited = script.replaced(node.value, f"{script.segment(node.value)} + 1")
            yield mutant_of(script, "off by one", node.value, ("lm-not-causal",), edited)
    for node in script.nodes(ast.Slice):
        assert isinstance(node, ast.Slice)
        text = script.segment(node)
        if text.count("i + 1") == 2:
            for other, kind in (("i", "labels-not-shifted"), ("i + 2", "labels-double-shifted")):
                edited = script.replaced(node, text.replace("i + 1", other))
                yield mutant_of(script, f"from {other} in", node, (kind,), edited)


def slices(script: Script) -> Iterator[Mutant]:
    """A slice replaced by its neighbour, off by one, or left out."""
    for statement in script.statements:
        if not isinstance(statement, ast.Assign) or isinstance(statement.targets[0], ast.Subscript):
            continue
        shifted = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Subscript) and script.segment(node.slice) in (":, :-1", ":, 1:")
        ]
        if shifted and not isinstance(statement.value, ast.Call):
            yield from _shifts(script, statement, shifted)
        for bound in ("lower", "upper"):
            cut = [
                node
                for node in ast.walk(statement)
                if isinstance(node, ast.Subscript) and _only_bound(node.slice) == bound
            ]
            if cut:
                edited = script.spliced([(n, script.segment(n.value)) for n in cut])
                label = f"drop {bound} slices of"
                yield mutant_of(script, label, statement, ("val-overlaps-train",), edited)
    for node in script.nodes(ast.Subscript):
        assert isinstance(node, ast.Subscript)
        if isinstance(script.parents[node], ast.Call) and script.segment(node.slice) == ":, :-1":
            edited = script.replaced(node, f"{script.segment(node.value)}[:, 1:]")
            yield mutant_of(script, "neighbour's slice in", node, ("labels-not-shifted",), edited)


def names(script: Script) -> Iterator[Mutant]:
    """A name replaced by another of its sort."""
    for node in script.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        statement = script.statement_of(node)
        role = script.role(statement)
        if role in ("clip", "optimizer") and last_name(node.func) == "parameters":
            assert isinstance(node.func, ast.Attribute)
            own = script.segment(node.func.value)
            kinds = ("clip-wrong-params",)
            if role == "optimizer":
                kinds = ("param-not-in-optimizer", "param-no-grad")
            for other in sorted(script.modules - {own}):
                is_part = other.startswith(own) or own.startswith(other)
                if not is_part and other.startswith("self.") == own.startswith("self."):
                    edited = script.replaced(node.func.value, other)
                    yield mutant_of(script, f"{other} in", statement, kinds, edited)
        if script.segment(node) == "parallel(x)":
            edited = script.replaced(node.func, "model")
            yield mutant_of(script, "model in", node, ("ddp-grads-unsynced",), edited)
    for statement in script.having("update_bn"):
        call = script.call_of(statement)
        assert call is not None
        edited = script.replaced(call.args[1], "model")
        yield mutant_of(script, "model in", statement, ("swa-bn-not-updated",), edited)
    roots = [s for s in script.having("backward") if script.receiver(s).endswith("_loss")]
    for first, second in itertools.pairwise(roots):
        call = script.call_of(second)
        assert call is not None
        edited = script.replaced(call, f"{script.receiver(first)}.backward()")
        yield mutant_of(
            script, "first loss in", second, ("double-backward", "param-no-grad"), edited
        )
    for node in script.nodes(ast.BinOp):
        assert isinstance(node, ast.BinOp)
        if isinstance(node.op, ast.Div) and script.segment(node.right) == "window":
            edited = script.replaced(node.right, "ACCUMULATION")
            yield mutant_of(script, "ACCUMULATION in", node, ("accum-tail-misscaled",), edited)


def _shifts(script: Script, statement: ast.stmt, shifted: list[ast.Subscript]) -> Iterator[Mutant]:
    for node in shifted:
        other = ":, 1:" if script.segment(node.slice) == ":, :-1" else ":, :-1"
        edited = script.replaced(node, f"{script.segment(node.value)}[{other}]")
        label = f"slice becomes [{other}] in"
        yield mutant_of(script, label, statement, ("labels-not-shifted",), edited)
    edits = [(node, script.segment(node).replace("1", "2")) for node in shifted]
    yield mutant_of(
        script, "off by one in", statement, ("labels-double-shifted",), script.spliced(edits)
    )


def _is_horizon(script: Script, node: ast.BinOp) -> bool:
    parent = script.parents[node]
    if isinstance(parent, ast.keyword):
        return parent.arg in ("T_max", "total_steps", "total_iters")
    return isinstance(parent, ast.Assign) and script.segment(parent.targets[0]) == "total"


def _collects(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement adds to what earlier turns of a loop left."""
    if isinstance(statement, ast.Assign):
        name = script.segment(statement.targets[0])
        return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(statement.value))
    return isinstance(statement, (ast.AugAssign, ast.Expr, ast.Return))


def _only_bound(index: ast.expr) -> str:
    if not isinstance(index, ast.Slice) or index.step is not None:
        return ""
    if (index.lower is None) == (index.upper is None):
        return ""
    return "lower" if index.lower is not None else "upper"
