"""Reads a source tree as syntax and lists each breach of the import law and of the budgets.

Used by test_architecture.py on the library and on small bad trees. It never imports what it reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEVELS: Mapping[str, int] = {
    "core": 0,
    "config": 1,
    "numerics": 2,
    "optim": 2,
    "memory": 2,
    "data": 2,
    "tasks": 2,
    "models": 2,
    "observe": 2,
    "sanitizer": 2,
    "parallel": 3,
    "state": 4,
    "engine": 5,
    "assembly": 6,
    "judge": 7,
    "diagnosis": 7,
    "report": 8,
    "run": 9,
    "trainer": 10,
    "train_step": 10,
    "build": 10,
    "verify": 11,
    "planning": 12,
    "preflight": 13,
    "tuning": 13,
    "cli": 14,
    "__init__": 15,
    "__main__": 15,
}
"""Level of each room: a folder, or a module that stands alone beside the folders."""

ROOT_FACE = "__init__"
MAX_ROOMS = 28
MAX_FLOORS = 13
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_CONSTRUCTOR_ARGUMENTS = 8
MAX_STEP_LINES = 150
MAX_STEP_IFS = 1

ABSTRACT_MARKS = {"ABC", "ABCMeta", "Protocol"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its dotted name below the package, its text and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Import:
    """One import of one of our own modules, wherever in the file it stands."""

    source: str
    target: str
    line: int


@dataclass(frozen=True)
class Tree:
    """A whole package, read."""

    package: str
    modules: Mapping[str, Module]
    folders: frozenset[str]

    @classmethod
    def read(cls, root: Path) -> Tree:
        modules = {}
        folders = set()
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__" and len(parts) > 1:
                parts = parts[:-1]
            if len(parts) > 1 or path.name == "__init__.py":
                folders.update(path.parent.relative_to(root).parts)
            name = ".".join(parts)
            text = path.read_text(encoding="utf-8")
            modules[name] = Module(name, path, text, ast.parse(text))
        return cls(root.name, modules, frozenset(folders))

    def imports(self) -> Iterator[Import]:
        """Every import of one module by another, those in functions included."""
        for module in self.modules.values():
            for name, line in _imported_names(module, self.package):
                target = self._resolve(name)
                if target is not None and target != module.name:
                    yield Import(module.name, target, line)

    def _resolve(self, dotted: str) -> str | None:
        """Longest known module that `dotted` (absolute) begins with, or None for foreign ones."""
        if dotted == self.package:
            return ROOT_FACE
        prefix = self.package + "."
        if not dotted.startswith(prefix):
            return None
        name = dotted.removeprefix(prefix)
        while name:
            if name in self.modules:
                return name
            name = name.rpartition(".")[0]
        return ROOT_FACE


def _imported_names(module: Module, package: str) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that a file imports, each with its line."""
    is_folder = module.path.name == "__init__.py"
    own = [package, *([] if module.name == ROOT_FACE else module.name.split("."))]
    home = own if is_folder else own[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _last_name(node.func) in {
            "import_module",
            "__import__",
        }:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, node.lineno


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def import_breaches(tree: Tree) -> list[str]:
    """Imports that go up, sideways between folders, or from the public face."""
    breaches = [
        f"{name}: the room {module.room!r} has no level"
        for name, module in tree.modules.items()
        if module.room not in LEVELS
    ]
    for link in tree.imports():
        source, target = link.source.partition(".")[0], link.target.partition(".")[0]
        if source not in LEVELS or target not in LEVELS or source == target:
            continue
        place = f"{link.source}:{link.line} imports {link.target}"
        if LEVELS[target] > LEVELS[source]:
            breaches.append(f"{place}: level {LEVELS[source]} must not import {LEVELS[target]}")
        elif LEVELS[target] == LEVELS[source]:
            breaches.append(f"{place}: rooms of level {LEVELS[source]} do not import each other")
    return breaches


def floors(tree: Tree) -> dict[str, int]:
    """Floor of each room: 0 where it imports no other room, else one above the highest of them."""
    below: dict[str, set[str]] = {module.room: set() for module in tree.modules.values()}
    for link in tree.imports():
        source, target = link.source.partition(".")[0], link.target.partition(".")[0]
        if source != target:
            below[source].add(target)
    found: dict[str, int] = {}
    while len(found) < len(below):
        ready = {room for room in below if room not in found and below[room] <= found.keys()}
        if not ready:
            return {}  # A circle of rooms, which the law names.
        found |= {room: max((found[b] + 1 for b in below[room]), default=0) for room in ready}
    return found


def size_breaches(tree: Tree) -> list[str]:
    """More rooms or floors than a reader can hold in mind."""
    found = floors(tree)
    num_floors = len(set(found.values()))
    return [
        *([f"{len(found)} rooms, at most {MAX_ROOMS}"] if len(found) > MAX_ROOMS else []),
        *([f"{num_floors} floors, at most {MAX_FLOORS}"] if num_floors > MAX_FLOORS else []),
    ]


def cycles(tree: Tree) -> list[str]:
    """Groups of modules that import each other in a circle (Tarjan, 1972)."""
    edges: dict[str, list[str]] = {name: [] for name in tree.modules}
    for link in tree.imports():
        if link.target in edges:
            edges[link.source].append(link.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append("cycle: " + " <-> ".join(sorted(group)))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def _classes(tree: Tree) -> dict[str, ast.ClassDef]:
    """Every class of the tree by its bare name."""
    return {
        node.name: node
        for module in tree.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }


def _ancestry(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Bare names of all bases, followed through our own classes."""
    names: set[str] = set()
    open_nodes = [node]
    while open_nodes:
        for base in open_nodes.pop().bases:
            name = _last_name(base)
            if name not in names:
                names.add(name)
                if name in classes:
                    open_nodes.append(classes[name])
    return names


def _is_error(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    return any(name.endswith(("Error", "Exception")) for name in _ancestry(node, classes))


def _is_abstract(node: ast.ClassDef) -> bool:
    marks = {_last_name(base) for base in node.bases}
    marks |= {_last_name(keyword.value) for keyword in node.keywords}
    return bool(marks & ABSTRACT_MARKS)


def _dataclass_decorator(node: ast.ClassDef) -> ast.expr | None:
    return next((d for d in node.decorator_list if _last_name(d) == "dataclass"), None)


def _is_frozen(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and any(
        keyword.arg == "frozen" and isinstance(keyword.value, ast.Constant) and keyword.value.value
        for keyword in decorator.keywords
    )


def budget_breaches(tree: Tree) -> list[str]:
    """Files, functions and constructors that are too big."""
    breaches = []
    classes = _classes(tree)
    for module in tree.modules.values():
        lines = len(module.text.splitlines())
        if lines > MAX_FILE_LINES:
            breaches.append(f"{module.name}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, FunctionNode):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    breaches.append(
                        f"{module.name}:{node.lineno} {node.name}: {length} lines, "
                        f"at most {MAX_FUNCTION_LINES}"
                    )
            elif isinstance(node, ast.ClassDef):
                count = _constructor_arguments(node, classes)
                if count > MAX_CONSTRUCTOR_ARGUMENTS:
                    breaches.append(
                        f"{module.name}:{node.lineno} {node.name}: constructor takes {count}, "
                        f"at most {MAX_CONSTRUCTOR_ARGUMENTS}"
                    )
    return breaches


def _constructor_arguments(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> int:
    """Arguments of a constructor, 0 for the kinds that are free of the budget."""
    if "Module" in _ancestry(node, classes) or _is_error(node, classes):
        return 0
    decorator = _dataclass_decorator(node)
    if decorator is not None:
        if _is_frozen(decorator):
            return 0
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return sum(_is_argument(item) for item in fields)
    for item in node.body:
        if isinstance(item, FunctionNode) and item.name == "__init__":
            arguments = item.args
            return (
                len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
            ) + sum(extra is not None for extra in (arguments.vararg, arguments.kwarg))
    return 0


def _is_argument(item: ast.AnnAssign) -> bool:
    """Whether a dataclass field is an argument of the constructor."""
    return "ClassVar" not in ast.unparse(item.annotation) and not (
        isinstance(item.value, ast.Call)
        and any(
            keyword.arg == "init"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
            for keyword in item.value.keywords
        )
    )


def inheritance_breaches(tree: Tree) -> list[str]:
    """Classes that inherit from a concrete class of ours. Errors form a hierarchy and are free."""
    classes = _classes(tree)
    return [
        f"{module.name}:{node.lineno} {node.name} inherits from the concrete {base}"
        for module in tree.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and not _is_error(node, classes)
        for base in map(_last_name, node.bases)
        if base in classes and not _is_abstract(classes[base])
    ]


def name_breaches(tree: Tree) -> list[str]:
    """Public functions that share their name with a package."""
    return [
        f"{module.name}:{node.lineno} {node.name}() shares its name with the package {node.name}"
        for module in tree.modules.values()
        for node in module.tree.body
        if isinstance(node, FunctionNode) and node.name in tree.folders
    ]


def step_breaches(module: Module) -> list[str]:
    """What the file of the update must not hold."""
    breaches = []
    lines = len(module.text.splitlines())
    if lines > MAX_STEP_LINES:
        breaches.append(f"{module.name}: {lines} lines, at most {MAX_STEP_LINES}")
    ifs = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If | ast.IfExp | ast.Match)
    ] + [
        node.target.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.comprehension) and node.ifs
    ]
    if len(ifs) > MAX_STEP_IFS:
        breaches.append(f"{module.name}: decides on lines {sorted(ifs)}, at most {MAX_STEP_IFS}")
    breaches += [
        f"{module.name}:{node.lineno} uses {node.id}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and node.id in {"isinstance", "issubclass", "hasattr"}
    ]
    return breaches


def habit_breaches(tree: Tree) -> list[str]:
    """Patched torch outside the sanitizer, and environment variables of our own."""
    breaches = []
    for module in tree.modules.values():
        for node in ast.walk(module.tree):
            place = f"{module.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and str(node.value).startswith("SUREFOOT_"):
                breaches.append(f"{place} an environment variable of our own: {node.value}")
            targets: Sequence[ast.expr] = ()
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                targets = [node.target]
            for target in targets:
                dotted = ast.unparse(target)
                # torch.backends holds torch's own switches: setting them is their use.
                if (
                    dotted.startswith("torch.")
                    and not dotted.startswith("torch.backends.")
                    and module.room != "sanitizer"
                ):
                    breaches.append(f"{place} patches {dotted}")
    return breaches


def all_breaches(tree: Tree) -> list[str]:
    """Everything that the law forbids, the step's own rules included."""
    step = tree.modules.get("engine.step")
    return [
        *import_breaches(tree),
        *size_breaches(tree),
        *cycles(tree),
        *budget_breaches(tree),
        *inheritance_breaches(tree),
        *name_breaches(tree),
        *habit_breaches(tree),
        *(step_breaches(step) if step is not None else []),
    ]
