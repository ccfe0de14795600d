"""What the kernels become on a GPU that need not be present: registers, spills, memory, tensor cores.

Walks the cases that the files of this room declare (`compiled()`) and compiles each kernel in a process of
its own, since a process that interprets kernels cannot compile them. What came out is kept beside this file,
a table for each version of Triton; `python -m constate.kernels.triton.compile` brings that of the installed
one up to date. Knows Triton's compiler; knows no kernel.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import triton

from .launch import Compiled

# Target, and the shared memory that a program may have there, in bytes.
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
TARGETS = tuple(SHARED)
FOLDER = Path(__file__).parent / "tables"
WORKERS = 2

# What a product looks like in the assembler's text, best first.
UNITS = {
    "tcgen05": r"tcgen05\.mma",
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
    "mfma": r"v_mfma",
}


def modules() -> list[str]:
    """The files of this room that declare cases."""
    package = import_module(__package__ or "")
    names = [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return sorted(name for name in names if hasattr(import_module(name), "compiled"))


Case = tuple[str, int, Compiled]
"""The module, the number in it, and what was declared."""


def cases(everything: bool = False) -> list[Case]:
    """Every case once, or those that run by default at heads of 64 and 128."""
    found: dict[Any, Case] = {}
    for module in modules():
        for number, case in enumerate(import_module(module).compiled()):
            typed = (sorted(case.signature.items()), sorted(case.constants.items()))
            key = (case.kernel.__name__, repr(typed), case.warps, case.stages)
            if everything or case.default:
                found.setdefault(key, (module, number, case))
    return list(found.values())


def table(targets: Sequence[str], everything: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each case and target: `op kernel target registers spill_bytes shared_bytes tensor_core`, and
    `head dtype note warps stages float32_products source`.

    `registers` and `spill_bytes` are a thread's, stores and loads together; `shared_bytes` a program's;
    `tensor_core` the kind of instruction, "fma" where a product takes none, None where there is no product;
    `float32_products` how products of float32 entries are made. Where a case does not compile these are None
    and `error` says why. Raises ValueError for a target that is not one of TARGETS.
    """
    if unknown := [target for target in targets if target not in SHARED]:
        raise ValueError(f"target is {unknown[0]!r}; one of {', '.join(TARGETS)} is wanted")
    yield from _compiled((found, target) for found in cases(everything) for target in targets)


def _compiled(wanted: Iterable[tuple[Case, str]]) -> Iterator[dict[str, Any]]:
    """Rows, in order of the kernels."""
    kernels: dict[tuple[str, str], list[tuple[Case, str]]] = {}
    for found, target in wanted:
        kernels.setdefault((found[0], found[2].kernel.__name__), []).append((found, target))
    with ThreadPoolExecutor(WORKERS) as pool:
        for rows in pool.map(_elsewhere, kernels.values()):
            yield from rows


def _elsewhere(wanted: list[tuple[Case, str]]) -> list[dict[str, Any]]:
    """The rows of one kernel's cases, from another process; of what that did not live to say, why."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [f"{number}:{target}" for (_, number, _), target in wanted]
    with tempfile.TemporaryDirectory() as folder:
        told = {"TRITON_CACHE_DIR": folder, "TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
        command = [sys.executable, "-m", f"{__package__}.compile", wanted[0][0][0], *asked]
        done = subprocess.run(command, capture_output=True, text=True, env=plain | told)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return rows + [_row(case, target, error=error) for (_, _, case), target in wanted[len(rows) :]]


def digest(case: Compiled) -> str:
    """Of the source of a kernel and of every function that it calls, and of what it is compiled as."""
    sources: dict[str, str] = {}

    def collect(function: Any) -> None:
        text = sources[function.__name__] = inspect.getsource(function)
        for name in re.findall(r"\w+", text):
            called = getattr(function.__globals__.get(name), "fn", None)
            if called is not None and name not in sources:
                collect(called)

    collect(case.kernel.fn)
    # How float32 products are made is the target's affair: see _compile.
    constants = {name: value for name, value in case.constants.items() if name != "PRECISION"}
    typed = [sorted(case.signature.items()), sorted(constants.items()), case.warps, case.stages]
    return sha256(repr([sorted(sources.items()), typed]).encode()).hexdigest()[:12]


def kept(version: str = triton.__version__) -> list[dict[str, Any]]:
    """The table of a version of Triton, none for one that has none."""
    path = FOLDER / f"{version}.json"
    return json.loads(path.read_text()) if path.exists() else []


def refresh(everything: bool = False) -> int:
    """Compile for every target what the table of this Triton has not, as it now is; the number of rows.

    The table is written anew after every kernel: it took minutes to make."""
    wanted = [(found, target) for found in cases(everything) for target in TARGETS]
    keys = [(digest(case), target) for (_, _, case), target in wanted]
    rows = {(row["source"], row["target"]): row for row in kept() if "error" not in row}
    missing = [one for one, key in zip(wanted, keys, strict=True) if key not in rows]
    for row in _compiled(missing):
        rows[row["source"], row["target"]] = row
        text = ",\n".join(json.dumps(rows[key]) for key in keys if key in rows)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{triton.__version__}.json").write_text(f"[\n{text}\n]\n")
    return len(missing)


def _row(case: Compiled, target: str, **found: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("registers", "spill_bytes", "shared_bytes", "tensor_core", "float32_products"))
    about = {"head": case.head, "dtype": case.dtype, "note": case.note}
    about |= {"warps": case.warps, "stages": case.stages}
    return (
        {"op": case.op, "kernel": case.kernel.__name__, "target": target}
        | nothing
        | about
        | found
        | {"source": digest(case)}
    )


def measured(case: Compiled, target: str) -> dict[str, Any]:
    """The row of one case, compiled here."""
    told = io.StringIO()
    try:
        with redirect_stdout(told):
            made = _compile(case, target)
    except Exception as error:  # whatever the compiler says is the finding
        return _row(case, target, error=f"{type(error).__name__}: {str(error).strip()[-300:]}")
    text = made.asm["amdgcn"] if "amdgcn" in made.asm else made.asm["ptx"]
    units = [name for name, pattern in UNITS.items() if re.search(pattern, text)]
    core = None if "tt.dot" not in made.asm["ttir"] else units[0] if units else "fma"
    found: dict[str, Any] = _amd(text) if "amdgcn" in made.asm else _nvidia(told.getvalue())
    found["shared_bytes"] += made.metadata.shared
    exact = re.findall(r"tt\.dot [^:\n]*?(?:inputPrecision = (\w+) )?: tensor<\w+xf32>", made.asm["ttir"])
    found["float32_products"] = sorted({kind or "ieee" for kind in exact})
    return _row(case, target, **found, tensor_core=core)


def _compile(case: Compiled, target: str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    amd = target.startswith("gfx")
    place = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32)
    names = case.kernel.arg_names
    constants = {
        name: "ieee" if amd and value in ("tf32x3", "tf32") else value
        for name, value in case.constants.items()
    }
    if missing := [n for n in names if n not in case.signature and n not in constants]:
        raise ValueError(f"{case.kernel.__name__}: no type and no value for {', '.join(missing)}")
    signature = {n: _bare(case.signature.get(n)) for n in names}
    places = [place for n, kind in case.signature.items() for place in _places(kind, (names.index(n),))]
    # Memory is aligned as PyTorch's allocator aligns it.
    whole = [place for place, kind in places if kind and (kind.startswith("*") or kind.endswith(":16"))]
    absent = {place: None for place, kind in places if kind is None}
    source = ASTSource(
        case.kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()} | absent,
        attrs={place: [["tt.divisibility", 16]] for place in whole},
    )
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=place, options=make_backend(place).parse_options(options).__dict__)


def _bare(kind: Any) -> Any:
    """A type without its note, types of a tuple alike; what has none is compiled in."""
    if isinstance(kind, tuple):
        return tuple(_bare(item) for item in kind)
    return "constexpr" if kind is None else kind.split(":")[0]


def _places(kind: Any, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str | None]]:
    """Each type with the path to it: the argument's number, then places in tuples."""
    if isinstance(kind, tuple):
        for i, item in enumerate(kind):
            yield from _places(item, (*place, i))
    else:
        yield place, kind


def _nvidia(log: str) -> dict[str, int]:
    """From what ptxas tells of the kernel and of functions that it calls."""

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, log)]

    spilled = sum(numbers(r"(\d+) bytes spill stores")) + sum(numbers(r"(\d+) bytes spill loads"))
    registers = max(numbers(r"Used (\d+) registers"))
    return {"registers": registers, "spill_bytes": spilled, "shared_bytes": sum(numbers(r"(\d+) bytes smem"))}


def _amd(text: str) -> dict[str, int]:
    """From the metadata behind the assembler's text; a spilled register is 4 bytes of a thread's."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": 4 * number("vgpr_spill_count"),
        "shared_bytes": 0,
    }


def _main(arguments: Sequence[str]) -> None:
    if arguments in ([], ["--all"]):
        print(f"{refresh(bool(arguments))} rows compiled with Triton {triton.__version__}")
        return
    module, *asked = arguments
    made: list[Compiled] = list(import_module(module).compiled())
    for number, target in (one.split(":") for one in asked):
        print(json.dumps(measured(made[int(number)], target)), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
