"""The import law and the budgets hold for the library, and the check itself can fail."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import surefoot
from architecture import (
    MAX_CONSTRUCTOR_ARGUMENTS,
    MAX_FILE_LINES,
    MAX_FLOORS,
    MAX_FUNCTION_LINES,
    MAX_ROOMS,
    MAX_STEP_LINES,
    Tree,
    all_breaches,
    size_breaches,
)

SOURCE = Path(surefoot.__file__).parent
MAX_PUBLIC_NAMES = 36


def test_the_library_keeps_the_law() -> None:
    assert all_breaches(Tree.read(SOURCE)) == []


def test_the_update_is_where_the_check_looks_for_it() -> None:
    assert "engine.step" in Tree.read(SOURCE).modules


def test_public_names_are_few_and_each_resolves() -> None:
    assert len(surefoot.__all__) <= MAX_PUBLIC_NAMES
    assert dir(surefoot) == sorted(surefoot.__all__)
    for name in surefoot.__all__:
        assert getattr(surefoot, name) is not None


@pytest.mark.parametrize("name", sorted(set(surefoot.__all__) - {"__version__"}))
def test_a_public_name_shows_an_example(name: str) -> None:
    # The doctests of its module run it.
    assert ">>> " in (inspect.getdoc(getattr(surefoot, name)) or "")


def test_no_public_name_is_a_package() -> None:
    assert not set(surefoot.__all__) & Tree.read(SOURCE).folders


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = surefoot.Trainr


def loaded_by(statements: str, names: list[str]) -> list[str]:
    """Which of `names` a fresh interpreter holds after running `statements`."""
    program = f"import sys\n{statements}\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()[-1].split()


def modules_below(room: str) -> list[str]:
    names = [name for name in Tree.read(SOURCE).modules if name.partition(".")[0] == room]
    assert names
    return [f"surefoot.{name}" for name in names]


@pytest.mark.parametrize("room", ["core", "config"])
def test_core_and_config_load_no_torch(room: str) -> None:
    assert loaded_by("import " + ", ".join(modules_below(room)), ["torch"]) == []


def test_the_package_itself_loads_next_to_nothing() -> None:
    heavy = ["torch", "pydantic", "scipy", "numpy", "typer", "rich"]
    assert loaded_by("import surefoot", heavy) == []


def test_what_compiles_nothing_loads_no_compiler() -> None:
    """It takes a second of each process that only reads weights or starts ranks."""
    parts = "import surefoot.assembly.run_parts, surefoot.state.foreign_reader, surefoot.cli.train"
    assert loaded_by(parts, ["torch._dynamo"]) == []


def loaded_by_command(arguments: list[str], names: list[str]) -> list[str]:
    statements = (
        f"sys.argv = ['surefoot', *{arguments!r}]\n"
        "from surefoot.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    return loaded_by(statements, names)


def test_help_loads_neither_torch_nor_pydantic_nor_scipy() -> None:
    heavy = ["torch", "pydantic", "scipy", "yaml", "numpy"]
    assert loaded_by_command(["--help"], heavy) == []


@pytest.mark.parametrize(
    "arguments", [["train", "--help"], ["--version"], ["trian"], ["show", "paramz"], ["runs", "x"]]
)
def test_a_mistake_is_answered_without_torch(arguments: list[str]) -> None:
    # pydantic is not in the list: typer itself reads values with it.
    assert loaded_by_command(arguments, ["torch", "scipy", "numpy"]) == []


def test_this_check_of_loaded_modules_sees_one() -> None:
    assert loaded_by("import json, colorsys", ["colorsys", "torch"]) == ["colorsys"]


def test_torchvision_is_absent_beside_a_cpu_torch() -> None:
    # Beside a CPU build it does not import, and while it is installed transformers fails too.
    import torch

    if torch.version.cuda is not None:
        pytest.skip("a CUDA build may have a torchvision that imports")
    assert importlib.util.find_spec("torchvision") is None


# The check itself, on small trees that each break one rule.

Write = Callable[[dict[str, str]], Tree]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_tree(files: dict[str, str]) -> Tree:
        root = tmp_path / "surefoot"
        for name, text in {"__init__.py": "", **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return Tree.read(root)

    return write_tree


CLEAN = {
    "core/__init__.py": "",
    "core/errors.py": (
        "class SurefootError(Exception): pass\nclass DataError(SurefootError): pass\n"
    ),
    "core/ports.py": "from abc import ABC\nclass Port(ABC): pass\n",
    "optim/__init__.py": "",
    "optim/registry.py": (
        "import torch\nfrom surefoot.core.errors import DataError\n"
        "from surefoot.core.ports import Port\nfrom surefoot.optim import ema\n"
        "class Real(Port): pass\ntorch.backends.cudnn.benchmark = True\n"
    ),
    "optim/ema.py": "",
    "engine/__init__.py": "",
    "engine/step.py": "from surefoot.optim import registry\ndef update(x):\n    if x: pass\n",
    "trainer.py": "from surefoot.engine.step import update\n",
    "build.py": "from surefoot.engine.step import update\ndef build_all(): pass\n",
}


def test_a_clean_tree_has_no_breach(write: Write) -> None:
    assert all_breaches(write(CLEAN)) == []


def test_too_many_rooms_are_a_breach(write: Write) -> None:
    rooms = {f"room{n}/__init__.py": "" for n in range(MAX_ROOMS)}
    assert size_breaches(write(rooms)) == [f"{MAX_ROOMS + 1} rooms, at most {MAX_ROOMS}"]


def test_too_many_floors_are_a_breach(write: Write) -> None:
    stairs = {
        f"room{n}/__init__.py": f"import surefoot.room{n - 1}\n" if n else ""
        for n in range(MAX_FLOORS + 1)
    }
    assert size_breaches(write(stairs)) == [f"{MAX_FLOORS + 1} floors, at most {MAX_FLOORS}"]


BAD_TREES: dict[str, tuple[dict[str, str], str]] = {
    "up": ({"core/bad.py": "import surefoot.optim.ema\n"}, "level 0 must not import 2"),
    "up, from": ({"core/bad.py": "from surefoot.optim import ema\n"}, "level 0 must not import 2"),
    "up, relative": ({"core/bad.py": "from ..optim import ema\n"}, "level 0 must not import 2"),
    "up, package alone": ({"core/bad.py": "from surefoot import optim\n"}, "must not import 2"),
    "up, in a function": (
        {"core/bad.py": "def late():\n    from surefoot.optim import ema\n"},
        "core.bad:2 imports optim.ema: level 0 must not import 2",
    ),
    "up, for types only": (
        {
            "core/bad.py": (
                "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from surefoot.optim import ema\n"
            )
        },
        "level 0 must not import 2",
    ),
    "up, by name": (
        {"core/bad.py": "import importlib\nx = importlib.import_module('surefoot.optim.ema')\n"},
        "level 0 must not import 2",
    ),
    "sideways": (
        {"data/__init__.py": "", "data/bad.py": "from surefoot.optim import ema\n"},
        "rooms of level 2 do not import each other",
    ),
    "public face": ({"optim/bad.py": "import surefoot\n"}, "level 2 must not import 15"),
    "room without a level": ({"misc/bad.py": ""}, "the room 'misc' has no level"),
    "cycle": (
        {
            "core/a.py": "from surefoot.core import b\n",
            "core/b.py": "from surefoot.core import c\n",
            "core/c.py": "def late():\n    from surefoot.core.a import x\n",
        },
        "cycle: core.a <-> core.b <-> core.c",
    ),
    "sideways at the root": (
        {"build.py": "from surefoot.trainer import x\ndef build_all(): pass\n"},
        "rooms of level 10 do not import each other",
    ),
    "long file": ({"core/bad.py": "x = 1\n" * (MAX_FILE_LINES + 1)}, "501 lines"),
    "long function": (
        {"core/bad.py": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES},
        "core.bad:1 f: 81 lines",
    ),
    "long method": (
        {"core/bad.py": "class A:\n  async def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES},
        "core.bad:2 f: 81 lines",
    ),
    "wide constructor": (
        {"core/bad.py": "class A:\n    def __init__(self, a, b, c, d, e, f, g, *, h, i): pass\n"},
        "constructor takes 9",
    ),
    "wide constructor by packing": (
        {"core/bad.py": "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, **i): pass\n"},
        "constructor takes 9",
    ),
    "wide mutable dataclass": (
        {
            "core/bad.py": "from dataclasses import dataclass\n@dataclass(slots=True)\nclass A:\n"
            + "".join(f"    f{n}: int\n" for n in range(MAX_CONSTRUCTOR_ARGUMENTS + 1))
        },
        "constructor takes 9",
    ),
    "concrete base": (
        {"core/bad.py": "class A: pass\nclass B(A): pass\n"},
        "B inherits from the concrete A",
    ),
    "concrete base elsewhere": (
        {
            "core/bad.py": "class A: pass\n",
            "optim/bad.py": "import surefoot.core.bad as c\nclass B(c.A): pass\n",
        },
        "B inherits from the concrete A",
    ),
    "function named as a package": (
        {"core/bad.py": "def optim(): pass\n"},
        "optim() shares its name with the package optim",
    ),
    "own environment variable": (
        {"core/bad.py": "import os\nx = os.environ.get('SUREFOOT_MODE')\n"},
        "an environment variable of our own",
    ),
    "patched torch": (
        {"optim/bad.py": "import torch\ntorch.nn.Linear.forward = None\n"},
        "patches torch.nn.Linear.forward",
    ),
    "long step": (
        {"engine/step.py": "x = 1\n" * (MAX_STEP_LINES + 1)},
        "151 lines, at most 150",
    ),
    "two ifs in the step": (
        {"engine/step.py": "x = 1\nif x: pass\ny = 1 if x else 2\n"},
        "decides on lines [2, 3]",
    ),
    "a filter in the step": (
        {"engine/step.py": "x = []\nif x: pass\ny = [z for z in x if z]\n"},
        "decides on lines [2, 3]",
    ),
    "isinstance in the step": (
        {"engine/step.py": "x = isinstance(1, int)\n"},
        "uses isinstance",
    ),
}


@pytest.mark.parametrize("case", BAD_TREES)
def test_each_rule_can_fail(case: str, write: Write) -> None:
    files, expected = BAD_TREES[case]
    breaches = all_breaches(write({**CLEAN, **files}))
    assert len(breaches) == 1, breaches
    assert expected in breaches[0]


@pytest.mark.parametrize(
    "text",
    [
        "class BadError(Exception):\n    def __init__(self, a, b, c, d, e, f, g, h, i): pass\n",
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self, a, b, c, d, e, f, g, h, i): pass\n",
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n"
        + "".join(f"    f{n}: int\n" for n in range(12)),
        "from dataclasses import dataclass, field\n@dataclass\nclass A:\n"
        + "".join(f"    f{n}: int = field(init=False)\n" for n in range(12)),
    ],
    ids=["error", "module", "frozen dataclass", "fields outside the constructor"],
)
def test_what_is_free_of_the_constructor_budget(text: str, write: Write) -> None:
    assert all_breaches(write({**CLEAN, "optim/wide.py": text})) == []
