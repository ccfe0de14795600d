"""Faults that others' users reported, as tests of the Triton kernels, run in Triton's interpreter.

The letters name the kinds of report, as in tests/test_cases.py, which has them for the other backends. B:
going on from a state; F: numbers; G: long sequences; K: machines and layouts; O: compilers. Each call says
that its kernel ran, and no other form instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from constate.kernels import dispatch
from constate.kernels.dispatch import select
from constate.kernels.triton.launch import launches
from constate.spans import Spans
from tests import loops
from tests.kernels import calls, hostile
from tests.kernels.calls import LINEAR, behind, between, columns, copied, crossed, guarded, poisoned, same
from tests.models import MODELS, make, tokens
from tests.referee import same_logits

DELTA = ("delta", "delta, by channel", "low rank")
STATES = (*LINEAR, *DELTA, "selective", "recurrence")
KINDS = (*STATES, "conv")  # with a state, that is; attention has a past
ELSEWHERE = ("attention",)  # prompts: PyTorch's fused attention serves them, by reason


def run(op: str, given: dict[str, Any]) -> list[Tensor]:
    """The op by its Triton kernels."""
    with launches() as made:
        got = calls.run("triton", op, given)
    choice = select("triton", "cpu").choices[op]
    assert op in ELSEWHERE or choice.backend == "triton", f"{op}: {choice.reason}"
    assert op in ELSEWHERE or made, f"{op} launched nothing"
    return got


def reference(op: str, given: dict[str, Any]) -> list[Tensor]:
    return calls.run("reference", op, copied(given))


def held(op: str) -> str:
    return "history" if op == "short_conv_step" else "state"


# -- B: going on from a state ------------------------------------------------------------------------

CUTS = (1, 3, 15, 16, 33, 49)  # within the first taps, and on both sides of tiles
LONG, HEADS = 50, (1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_two_pieces_are_the_whole(kind: str) -> None:
    """Case B1: the same row cut at each of CUTS, all cuts packed in one call for the first pieces and one for
    the second, which starts from the first's states; then the last token alone by a step (case B3)."""
    op, whole = calls.scan(kind, [LONG], heads=HEADS)
    alike = {name: x for name, x in whole.items() if isinstance(x, Tensor) and len(x) == LONG}

    def pieces(where: list[slice], initial: Tensor) -> list[Tensor]:
        given = {name: torch.cat([x[part] for part in where]) for name, x in alike.items()}
        spans = Spans.of(part.stop - part.start for part in where)
        return run(op, {**whole, **given, "initial": initial, "spans": spans})

    first, last = [slice(0, cut) for cut in CUTS], [slice(cut, LONG) for cut in CUTS]
    start = whole["initial"].expand(len(CUTS), *whole["initial"].shape[1:])
    o, middle = pieces(first, start.clone())
    rest, final = pieces(last, middle)
    want, end = reference(op, whole)
    for part, mine in zip(first, o.split(CUTS), strict=True):
        same([mine], [want[part]], f"{kind}, {part}", 5e-5)
    for part, mine in zip(last, rest.split([LONG - cut for cut in CUTS]), strict=True):
        same([mine], [want[part]], f"{kind}, {part}", 5e-5)
    same(list(final), [end[0]] * len(CUTS), f"{kind}, final", 5e-5)
    assert CUTS[-1] == LONG - 1
    token = {name: x[-1:] for name, x in alike.items()}
    stepped = "short_conv_step" if op == "short_conv" else f"{op.removesuffix('_scan')}_step"
    more = {name: x for name, x in whole.items() if name not in (*alike, "initial", "spans")}
    got = run(stepped, {**more, **token, held(stepped): middle[-1:].clone()})
    same(got, [want[-1:], end], f"{kind}, a step", 5e-5)


FOLDED = (1, 2, 16, 17)


NARROW = ("linear", "linear, by channel", "delta", "selective")  # whose sums and roundings the others share


@pytest.mark.parametrize(
    ("kind", "dtype"), [(k, torch.float32) for k in KINDS] + [(k, torch.bfloat16) for k in NARROW], ids=str
)
def test_a_scan_is_its_steps(kind: str, dtype: torch.dtype) -> None:
    """Case B2: rows of these lengths from random states, all kernels' own; the state is float32 whatever the
    inputs are."""
    op, given = calls.scan(kind, FOLDED, heads=HEADS)
    spans, n = given["spans"], sum(FOLDED)
    cast = ("q", "k", "v", "x", "z", "b", "c")
    given = {name: x.to(dtype) if name in cast and isinstance(x, Tensor) else x for name, x in given.items()}
    o, final = run(op, copied(given))
    assert o.dtype == dtype and final.dtype == torch.float32
    stepped = "short_conv_step" if op == "short_conv" else f"{op.removesuffix('_scan')}_step"
    state, mine = given["initial"].clone(), torch.zeros_like(o)
    more = {k: x for k, x in given.items() if k not in ("initial", "spans")}
    for t in range(max(FOLDED)):
        rows = [r for r, length in enumerate(FOLDED) if length > t]
        at = torch.tensor([spans.offsets[r] + t for r in rows])
        token = {k: x[at] for k, x in more.items() if isinstance(x, Tensor) and len(x) == n}
        part = state[rows]
        mine[at] = run(stepped, {**more, **token, held(stepped): part})[0]
        state[rows] = part
    bound = 5e-5 if dtype == torch.float32 else 1e-2
    same([o, final], [mine, state], kind, bound)


NEUTRAL = {
    **{kind: {"k": 0.0, "log_decay": 0.0} for kind in LINEAR[:2]},
    LINEAR[2]: {"k": 0.0},
    **{kind: {"beta": 0.0, "log_decay": 0.0} for kind in DELTA[:2]},
    "low rank": {"b": 0.0, "k": 0.0, "log_decay": 0.0},
    "selective": {"dt": -1e4},
    "recurrence": {"x": 0.0, "log_a": 0.0},
}


@pytest.mark.parametrize("kind", NEUTRAL)
def test_what_a_tail_is_filled_with_changes_nothing(kind: str) -> None:
    """Case B3: the neutral token in the middle and at the end, whatever else it carries, is none."""
    op, given = calls.scan(kind, [40], heads=HEADS)
    real = torch.ones(40, dtype=torch.bool)
    real[[2, 3, 15, 16, 30]] = real[33:] = False
    without = {n: x[real] if isinstance(x, Tensor) and len(x) == 40 else x for n, x in given.items()}
    want = run(op, {**without, "spans": Spans.of([int(real.sum())])})
    for name, value in NEUTRAL[kind].items():
        given[name][~real] = value
    o, final = run(op, given)
    same([o[real], final], want, kind, 1e-5)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_the_convolutions_edges(width: int, dtypes: tuple[str, str]) -> None:
    """Case B4: rows of 0 to w + 1 tokens, with and without a history of either dtype, beside the sum written
    out; the history is the last w - 1 real inputs, also of a row that has fewer."""
    dtype, kept = (getattr(torch, name) for name in dtypes)
    lengths, c = range(width + 2), 5
    x, weight, bias = (
        hostile.normal(*shape, seed=i) for i, shape in enumerate([(sum(lengths), c), (c, width), (c,)])
    )
    x, spans = x.to(dtype), Spans.of(lengths)
    for start in (
        None,
        torch.zeros(spans.rows, width - 1, c),
        hostile.normal(spans.rows, width - 1, c, seed=9),
    ):
        history = None if start is None else start.to(kept)
        given = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "initial": history,
            "spans": spans,
            "activation": None,
        }
        o, final = run("short_conv", given)
        assert o.shape == x.shape and o.dtype == dtype
        assert final.dtype == (dtype if history is None else kept)
        for row, part in enumerate(spans.slices()):
            before = torch.zeros(width - 1, c) if history is None else history[row]
            seen = torch.cat([before.double(), x[part].double()])
            for t in range(lengths[row]):
                want = bias.double() + sum(weight[:, j].double() * seen[t + j] for j in range(width))
                same(
                    [o[part][t].double()],
                    [want],
                    f"row {row}, token {t}",
                    1e-2 if dtypes[0] != "float32" else 1e-5,
                )
            left = seen[len(seen) - (width - 1) :]
            assert torch.equal(final[row].double(), left.to(final.dtype).double()), f"history of row {row}"
    one = {"weight": weight, "bias": bias, "activation": "silu"}
    past = hostile.normal(3, width - 1, c, seed=10).to(kept)
    stepped = {**one, "x": x[:3], "history": past}
    same(run("short_conv_step", copied(stepped)), reference("short_conv_step", stepped), "step", 1e-2)


# -- F: numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*LINEAR, *DELTA, "recurrence"])
def test_all_kept_and_all_forgotten(kind: str) -> None:
    """Case F4: with every log-decay at -inf a token is alone with itself, and with every one at 0 nothing is
    lost: sums written out, of unit keys for the delta rules, which erase what they write over."""
    op, given = calls.scan(kind, [LONG])
    name = "log_a" if kind == "recurrence" else "log_decay"
    given["initial"].zero_()
    for value in (-torch.inf, 0.0):
        if given[name] is None and value:
            continue
        if given[name] is not None:
            given[name].fill_(value)
        if kind == "low rank":
            given["b"].zero_()  # reads the state before its decay: without that it is a linear scan
        got, final = run(op, copied(given))
        assert bool(got.isfinite().all()) and bool(final.isfinite().all())
        if kind == "recurrence":
            x = given["x"].double()
            same([got.double()], [x if value else x.cumsum(0)], kind, 1e-5)
            continue
        q, k, v = (given[part].double() for part in "qkv")
        q, k = (part.repeat_interleave(v.shape[1] // part.shape[1], 1) for part in (q, k))
        if "delta" in kind:
            if not value:
                continue  # the reference says it
            v = v * given["beta"].double()[..., None]
        pairs = torch.einsum("thd,shd->hts", q, k)
        pairs = torch.diag_embed(pairs.diagonal(dim1=1, dim2=2)) if value else pairs.tril()
        same([got.double()], [given["scale"] * torch.einsum("hts,shd->thd", pairs, v)], kind, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_any_mixture_of_decays(kind: str) -> None:
    """Case F4: 0, -1e-6, -5, -50, -1e4 and -inf mixed in every tile, beside the reference."""
    op, given = calls.scan(kind, [LONG, 0, 17], seed=3)
    same(run(op, copied(given)), reference(op, given), kind, 5e-5)


@pytest.mark.parametrize("kind", [*LINEAR[:2], *DELTA, "recurrence"])
def test_a_positive_log_decay_is_refused_where_asked(kind: str) -> None:
    """Case F4: the same words as any backend's, before a kernel runs."""
    op, given = calls.scan(kind, [5])
    name = "log_a" if kind == "recurrence" else "log_decay"
    given[name][3] = 0.1
    with launches() as made, pytest.raises(ValueError, match=f"{name} holds 0.1"):
        calls.run("triton", op, {**given, "checked": True})
    assert not made


TAILS = ([17], [15, 0, 16, 1])


@pytest.mark.parametrize("kind", [*KINDS, "attention"])
def test_nothing_is_read_past_the_end(kind: str) -> None:
    """Case F5: NaN round every tensor never reaches an output, a state or a neighbour."""
    scans = [] if kind == "attention" else [calls.scan(kind, lengths, heads=HEADS) for lengths in TAILS]
    for op, given in (*scans, calls.step(kind, 5)):
        want = reference(op, given)
        for guard in (behind, between):
            same(run(op, copied(given, guard)), want, f"{op}, {guard.__name__}", 5e-5)


@pytest.mark.parametrize("how", ["step", "scan"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_past_the_end(kind: str, how: str) -> None:
    """Case F5: the band round a state that is updated in place, and round all that is only read."""
    op, given = calls.step(kind, 5) if how == "step" else calls.scan(kind, [17, 1], heads=HEADS)
    for guard in (guarded, between):
        inside = copied(given, guard)
        bases = {name: x._base for name, x in inside.items() if isinstance(x, Tensor)}
        run(op, inside)
        for name, base in bases.items():
            assert base is not None
            assert int(base.isnan().sum()) == base.numel() - inside[name].numel(), f"beside {name}"


@pytest.fixture
def unwritten() -> Iterator[None]:
    with poisoned():
        yield


@pytest.mark.parametrize("heads", [(2, 2), (1, 3), (2, 6)], ids=str)
@pytest.mark.parametrize("kind", [*LINEAR, *DELTA, "attention", "attention, window"])
def test_every_head_of_an_output_is_written(kind: str, heads: tuple[int, int], unwritten: None) -> None:
    """Case F6: outputs start as NaN and come back whole, for each way of sharing key heads."""
    for op, given in (calls.scan(kind, [17, 0, 1], heads=heads), calls.step(kind, 3, heads=heads)):
        want = reference(op, given)
        same(run(op, given), want, op, 5e-5)


@pytest.mark.parametrize("heads", [(2, 3), (2, 33)], ids=str)
@pytest.mark.parametrize("kind", [*LINEAR, *DELTA])
def test_heads_that_cannot_share_are_refused(kind: str, heads: tuple[int, int]) -> None:
    """Case F6: by name and number, before a kernel runs."""
    for op, given in (calls.scan(kind, [3], heads=heads), calls.step(kind, 3, heads=heads)):
        with (
            launches() as made,
            pytest.raises(ValueError, match=f"{heads[1]} value heads cannot share 2 key"),
        ):
            calls.run("triton", op, given)
        assert not made


# -- G: long sequences --------------------------------------------------------------------------------

FAR = Path(__file__).parent / "far_apart.py"


def test_tokens_further_apart_than_32_bits_count() -> None:
    """Case G1: three tokens 2**30 numbers apart, in a file of holes; where an offset wraps there is NaN. A
    process of its own, since one that wraps further would end there."""
    done = subprocess.run([sys.executable, str(FAR)], capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2].startswith("right: "), done.stdout


# -- K: machines and layouts --------------------------------------------------------------------------

PLAIN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ON_A_CPU = """
import torch
from constate.kernels.dispatch import BackendUnavailable, select
from tests.kernels import calls
try:
    select("triton", "cpu")
except BackendUnavailable as error:
    assert "cpu" in str(error) and "GPU" in str(error), error
else:
    raise AssertionError("it was given")
import constate.kernels.dispatch as d
for kind in calls.EVERY:
    for op, given in (calls.scan(kind, [3, 2]), calls.step(kind, 2)):
        if d._choice(op, "triton", "").backend != "triton":
            continue
        function = getattr(d.import_module(d._module("triton", d.FILES[op]), "constate.kernels"), op)
        try:
            function(**given)
        except ValueError as error:
            assert "cpu was given to a Triton kernel" in str(error), (op, error)
        else:
            raise AssertionError(f"{op} took a tensor on the CPU")
torch.cuda.is_available = lambda: True
ops = select("auto", "cuda")
assert ops.backend == "torch" and "no driver" in ops.choices["gated_linear_scan"].reason, ops
print("told")
"""
NO_TRITON = """
import sys
import torch
sys.modules["triton"] = None
torch.cuda.is_available = lambda: True
from constate.kernels.dispatch import BackendUnavailable, available, select
ops = select("auto", "cuda")
assert ops.backend == "torch" and "Triton is not installed" in ops.choices["gated_linear_scan"].reason, ops
try:
    select("triton", "cuda")
except BackendUnavailable as error:
    assert "not installed" in str(error)
(row,) = [row for row in available("cuda") if row.backend == "triton"]
assert not row.here
print("told")
"""


@pytest.mark.parametrize("script", [ON_A_CPU, NO_TRITON], ids=["Triton without a driver", "without Triton"])
def test_machines_that_lack_something(script: str) -> None:
    """Case K2: outside the interpreter; the family that runs all the same is tests/test_cases.py's."""
    if torch.cuda.is_available():
        pytest.skip("this machine lacks nothing")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=PLAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "told"


@pytest.mark.parametrize("kind", [*KINDS, "attention"])
def test_tensors_of_two_devices_are_refused(kind: str) -> None:
    """Case K3: one tensor at a time elsewhere, which the error names, and no kernel runs."""
    for op, given in (calls.scan(kind, [5, 3]), calls.step(kind, 3)):
        if op in ELSEWHERE:
            continue
        for name, x in given.items():
            if isinstance(x, Tensor):
                with launches() as made, pytest.raises(ValueError, match=r"is on .*: one device is wanted"):
                    calls.run("triton", op, {**given, name: x.to("meta")})
                assert not made, f"{op}, {name} elsewhere"


WIDTHS = ((48, 80), (100, 96))


@pytest.mark.parametrize("kind", [*KINDS, "attention", "attention, window"])
def test_any_head_width_and_any_layout(kind: str) -> None:
    """Case K4: widths of 48, 80, 96 and 100; transposed and sliced inputs equal contiguous ones."""
    for dims in WIDTHS:
        sizes: dict[str, Any] = {"dims": dims, "heads": HEADS}
        for op, given in (calls.scan(kind, [17, 1], **sizes), calls.step(kind, 2, **sizes)):
            want = reference(op, given)
            for layout in (columns, crossed) if dims == WIDTHS[0] else (between,):
                same(run(op, copied(given, layout)), want, f"{op} of {dims}, {layout.__name__}", 5e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [*KINDS, "attention"])
def test_expanded_inputs(kind: str, axis: int) -> None:
    """Case K4: tensors that are only read, all the same along an axis, without memory of their own for it."""
    for op, given in (calls.scan(kind, [17, 1], heads=HEADS), calls.step(kind, 3)):
        if op in ELSEWHERE:
            continue
        flat = {
            name: x.narrow(axis, 0, 1).expand_as(x)
            for name, x in given.items()
            if isinstance(x, Tensor)
            and name not in ("state", "history", "lengths")
            and -x.ndim <= axis < x.ndim
        }
        want = reference(op, {**given, **flat})
        rest = {name: x for name, x in copied(given).items() if name not in flat}
        same(run(op, {**rest, **flat}), want, f"{op}, axis {axis}", 5e-5)


ODD = {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2}


def test_a_projection_that_no_vector_width_divides() -> None:
    """Case K4: 2 * 128 + 2 * 128 + 2 = 514 rows, two heads; forward, a piece and a step are the loop's."""
    over = {"model_type": "mamba2", **ODD}
    model, prompt = make("mamba2", "triton", **over), tokens(19)
    want = loops.model(model, prompt, {**MODELS["mamba2"].raw, **over})
    cache = model.init_cache(1)
    with launches() as made:
        parts = [model(piece, Spans.of([len(piece)]), cache) for piece in prompt[:18].split([17, 1])]
        parts.append(model.step(prompt[18:], cache))
    same_logits(torch.cat(parts), want)
    assert made


# -- O: compilers -------------------------------------------------------------------------------------


UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
)  # compiled whole in test_compile.py


class Seen(TorchDispatchMode):
    """The package's own ops that are called, with their arguments before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "constate":
            copies = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
            self.calls.setdefault(func._schema.name, (func, copies, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*KINDS, "attention, step"])
def test_every_op_is_registered_and_has_a_shape_for_compilers(kind: str) -> None:
    """Case O1: `constate::triton_NAME`, with what it writes to declared and a fake that agrees with it."""
    scans = [calls.scan(kind, [9, 3], heads=HEADS)] if kind in KINDS else []
    for op, given in (*scans, calls.step(kind, 3)):
        with Seen() as seen, torch.no_grad():
            run(op, given)
        assert f"constate::triton_{op}" in seen.calls, sorted(seen.calls)
        for func, args, kwargs in seen.calls.values():
            written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            assert written == ([held(op)] if op.endswith("_step") and kind in KINDS else [])
            torch.library.opcheck(func, args, kwargs, test_utils=UTILITIES)


def test_no_kernel_is_launched_past_the_one_door() -> None:
    """Cases K3 and O1: only launch.py calls a kernel, so that every launch is on its tensor's device."""
    import ast

    room = Path(dispatch.__file__).parent / "triton"
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            direct = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            assert not direct or path.name == "launch.py", f"{path.name}:{getattr(node, 'lineno', 0)}"
