"""The house's floors, read from the source: imports only go down, inside the package they are relative,
and what is heavy or optional is imported where it is used and not before.

Knows the rooms' order and nothing of what is in them. The rules are one function over a source text, so
that the last tests can plant violations and see each reported.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "constate"
ROOT = Path(__file__).parents[1] / PACKAGE

FLOORS = (
    ("spans",),
    ("kernels",),
    ("core",),
    ("ssm", "linear_attn"),
    ("hybrid",),
    ("diffusion_lm",),
    ("loading", "generation", "training"),
    ("bench",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# Families share through core alone; these three are steps of one road (training loads and generates).
NEIGHBOURS = {"loading", "generation", "training"}
# The face reaches every room, lazily, and no room may reach for it but for its version.
FACE = "__init__"
LAZY = {"triton", "mamba_ssm", "causal_conv1d", "fla", "vllm", "ray", "transformers", "huggingface_hub"}


@dataclass(frozen=True)
class Import:
    """One imported name: the dotted parts of where it comes from, and when that is executed.

    `module` starts with the package's name where it is the package's own. `runs` is "top" (when the file
    is imported), "call" (inside a function) or "never" (under TYPE_CHECKING).
    """

    module: tuple[str, ...]
    relative: bool
    runs: str
    line: int


def imports(source: str, place: tuple[str, ...]) -> Iterator[Import]:
    """Every import in a file's text. `place` is the file's path in the package, `("core", "state")`."""

    def walk(node: ast.AST, runs: str) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(tuple(a.name.split(".")), False, runs, node.lineno) for a in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = (PACKAGE, *place)[: len(place) + 1 - level] if level else ()
                base += tuple(module.split(".")) if module else ()
                yield from (Import((*base, a.name), level > 0, runs, node.lineno) for a in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, "call" if runs == "top" else runs)
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body):
                for child in body:
                    yield from walk(child, "never")
                for child in node.orelse:
                    yield from walk(child, runs)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, runs)

    yield from walk(ast.parse(source), "top")


def faults(source: str, place: tuple[str, ...]) -> list[str]:
    """What a file's imports do wrong, one line each; empty where the floors hold."""
    room = place[0]
    if room != FACE and room not in LEVEL:
        return [f"{'/'.join(place)}: no floor is known for the room {room!r}"]
    found = []
    for item in imports(source, place):
        where = f"{'/'.join(place)}:{item.line}"
        first, *rest = item.module
        # A Triton kernel is a function whose globals hold triton, so that its own file must import it.
        kernel_file = first == "triton" and place[:2] == ("kernels", "triton")
        if first in LAZY and item.runs == "top" and not kernel_file:
            found.append(f"{where}: {first} is imported with the file; import it in the function using it")
        if first != PACKAGE:
            continue
        if not item.relative:
            found.append(f"{where}: {'.'.join(item.module)} is absolute; imports in the package are relative")
        if item.runs == "top" and rest[:2] == ["kernels", "triton"] and place[:2] != ("kernels", "triton"):
            found.append(f"{where}: kernels.triton imports triton; import it in the function that uses it")
        if room == FACE or rest == ["__version__"]:
            continue
        target = rest[0] if rest else FACE
        if target == room or {target, room} <= NEIGHBOURS:
            continue
        if target not in LEVEL:
            found.append(f"{where}: {target!r} is no room; the face is for users and rooms import each other")
        elif LEVEL[target] >= LEVEL[room]:
            found.append(f"{where}: {room} imports {target}, which is not below it")
    return found


def place_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


SOURCES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_only_go_down(path: Path):
    assert faults(path.read_text(encoding="utf-8"), place_of(path)) == []


def test_the_walk_meets_the_package():
    """An empty walk would hold every floor."""
    rooms = {place_of(path)[0] for path in SOURCES}
    assert {FACE, "__main__", "spans", "kernels", "core"} <= rooms
    assert any(
        item.module == (PACKAGE, "spans", "Spans")
        for path in SOURCES
        for item in imports(path.read_text(encoding="utf-8"), place_of(path))
    )


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.cli"])
def test_the_face_and_the_command_import_no_torch(module: str):
    """What `constate --help` waits for: a process of its own, since this one has torch already."""
    heavy = sorted(LAZY | {"torch", "numpy", "tokenizers", "safetensors", "altair", "vl_convert"})
    code = f"import json, sys, {module}; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []


def test_the_face_fetches_each_name_from_its_home():
    import constate
    from constate.core.cache import Cache
    from constate.generation import generate, stream
    from constate.loading import load
    from constate.spans import Spans

    assert constate.load is load
    assert constate.generate is generate
    assert constate.stream is stream
    assert constate.Cache is Cache
    assert constate.Spans is Spans
    assert set(constate.__all__) <= set(dir(constate))
    with pytest.raises(AttributeError, match=r"no attribute 'lode'; it offers .*load"):
        _ = constate.lode


PLANTED = [
    (("spans",), "from .core.state import State", "spans imports core, which is not below it"),
    (("kernels", "reference"), "from ..core import state", "kernels imports core"),
    (("core", "stack"), "from .. import ssm", "core imports ssm"),
    (("core", "stack"), "def build():\n    from ..ssm.mamba import Mamba", "core imports ssm"),
    (("core", "stack"), "if TYPE_CHECKING:\n    from ..hybrid.llama import Llama", "core imports hybrid"),
    (("ssm", "mamba"), "from ..linear_attn.gla import GLA", "ssm imports linear_attn"),
    (("linear_attn", "gla"), "from ..ssm.mamba import Mamba", "linear_attn imports ssm"),
    (("linear_attn", "__init__"), "from ..hybrid import composed", "linear_attn imports hybrid"),
    (("kernels", "chunked", "tiles"), "from ...bench.speed import bench", "kernels imports bench"),
    (("hybrid", "composed"), "from ..diffusion_lm.mdlm import MDLM", "hybrid imports diffusion_lm"),
    (("training",), "from .bench.quality import bpb", "training imports bench"),
    (("bench", "speed"), "from ..cli import main", "bench imports cli"),
    (("core", "stack"), "from constate.spans import Spans", "constate.spans.Spans is absolute"),
    (("core", "stack"), "def f():\n    import constate.spans", "constate.spans is absolute"),
    (("core", "stack"), "from .. import Spans", "'Spans' is no room"),
    (("attic", "old"), "import math", "no floor is known for the room 'attic'"),
    (("kernels", "dispatch"), "try:\n    import triton\nexcept ImportError: ...", "triton is imported with"),
    (("kernels", "dispatch"), "from .triton import gated_linear", "kernels.triton imports triton"),
    (("core", "attention"), "if True:\n    from fla.ops import gla", "fla is imported with the file"),
    (("loading",), "import huggingface_hub.constants", "huggingface_hub is imported with the file"),
    (("bench", "speed"), "class Peer:\n    import transformers", "transformers is imported with"),
    (("__init__",), "import transformers", "transformers is imported with the file"),
]


@pytest.mark.parametrize(("place", "source", "expected"), PLANTED)
def test_a_planted_fault_is_reported(place: tuple[str, ...], source: str, expected: str):
    found = faults(source, place)
    assert len(found) == 1, found
    assert expected in found[0]


ALLOWED = [
    (("core", "stack"), "from ..spans import Spans\nfrom ..kernels import dispatch\nfrom . import state"),
    (("core", "__init__"), "from .state import State\nfrom ..spans import Spans"),
    (("hybrid", "composed"), "from ..ssm.mamba import Mamba\nfrom ..linear_attn import gla"),
    (("training",), "from .loading import load\nfrom . import generation, __version__"),
    (("kernels", "dispatch"), "def pick():\n    import triton\n    from .triton import gated_linear"),
    (("kernels", "triton", "gated_linear"), "import triton.language as tl\nfrom .common import load_tile"),
    (("bench", "speed"), "if TYPE_CHECKING:\n    import transformers"),
    (("cli",), "import typer\ndef main():\n    from .generation import generate"),
]


@pytest.mark.parametrize(("place", "source"), ALLOWED)
def test_what_the_house_allows_is_not_reported(place: tuple[str, ...], source: str):
    assert faults(source, place) == []
