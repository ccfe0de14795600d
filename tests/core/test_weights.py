"""Weight rules: every kind forth and back, every fault named, and nothing skipped in silence."""

import pytest
import torch
from torch import Size, Tensor

from constate.core.weights import (
    drop,
    everything,
    export,
    fill,
    fuse,
    reorder,
    reshape,
    same,
    split,
    stack,
    transpose,
)


def shapes(**tensors: Tensor) -> dict[str, Size]:
    return {name.replace("__", "."): t.shape for name, t in tensors.items()}


# A dialect with one rule of each kind, the tensors of two layers, and what they must become.
RULES = [
    same("embed_tokens.weight", "embed.weight"),
    fuse(["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"], "blocks.{i}.qkv", (4, 2, 2)),
    fuse(["layers.{i}.gate", "layers.{i}.up"], "blocks.{i}.gate_up"),
    split("layers.{i}.in_proj", ["blocks.{i}.x", "blocks.{i}.dt"], (5, 1)),
    transpose("layers.{i}.c_fc", "blocks.{i}.fc"),
    reshape("layers.{i}.conv", "blocks.{i}.conv", (-1, 1, 3), (-1, 3)),
    drop("layers.{i}.rotary.inv_freq"),
]


def checkpoint() -> dict[str, Tensor]:
    source = {"embed_tokens.weight": torch.randn(7, 3)}
    for i in range(2):
        layer = dict(
            q=(4, 3), k=(2, 3), v=(2, 3), gate=(6, 3), up=(6, 3), in_proj=(6, 3), c_fc=(3, 8), conv=(5, 1, 3)
        )
        source |= {f"layers.{i}.{name}": torch.randn(shape) for name, shape in layer.items()}
    return source


def expected(source: dict[str, Tensor]) -> dict[str, Tensor]:
    params = {"embed.weight": source["embed_tokens.weight"]}
    for i in range(2):
        s = {
            name: source[f"layers.{i}.{name}"]
            for name in ("q", "k", "v", "gate", "up", "in_proj", "c_fc", "conv")
        }
        params |= {
            f"blocks.{i}.qkv": torch.cat([s["q"], s["k"], s["v"]]),
            f"blocks.{i}.gate_up": torch.cat([s["gate"], s["up"]]),
            f"blocks.{i}.x": s["in_proj"][:5],
            f"blocks.{i}.dt": s["in_proj"][5:],
            f"blocks.{i}.fc": s["c_fc"].T,
            f"blocks.{i}.conv": s["conv"][:, 0],
        }
    return params


def test_every_kind_of_rule_forth_and_back():
    source = checkpoint()
    want = expected(source)
    dropped = {"layers.1.rotary.inv_freq": torch.ones(2)}
    got = fill(RULES, source | dropped, {name: t.shape for name, t in want.items()})
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], t) for name, t in want.items())
    back = export(RULES, got)
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], t) for name, t in source.items())


def test_along_another_axis():
    rules = [fuse(["a", "b"], "ab", (2, 3), dim=1), split("cd", ["c", "d"], dim=-1)]
    source = {"a": torch.randn(4, 2), "b": torch.randn(4, 3), "cd": torch.randn(2, 8)}
    params = fill(rules, source, {"ab": Size([4, 5]), "c": Size([2, 4]), "d": Size([2, 4])})
    assert torch.equal(params["ab"], torch.cat([source["a"], source["b"]], 1))
    assert torch.equal(params["d"], source["cd"][:, 4:])
    assert all(torch.equal(t, source[name]) for name, t in export(rules, params).items())


def test_several_marks_and_a_repeated_one():
    rule = same("layers.{i}.experts.{e}.{i}.w", "blocks.{i}.e{e}")
    good, bad = "layers.11.experts.3.11.w", "layers.11.experts.3.1.w"
    t = torch.randn(2)
    assert fill([rule], {good: t}, {"blocks.11.e3": t.shape})["blocks.11.e3"] is t
    with pytest.raises(ValueError, match=r"no rule takes: layers\.11\.experts\.3\.1\.w"):
        fill([rule], {bad: t}, {})


def test_the_first_rule_that_knows_a_name_takes_it():
    a, b = torch.randn(2), torch.randn(2)
    got = fill([drop("old.*"), same("a", "z"), everything()], {"old.x": b, "a": a, "b": b}, shapes(z=a, b=b))
    assert got.keys() == {"z", "b"}


def test_finish_sees_each_parameter_once_and_its_result_is_kept():
    seen: list[str] = []

    def finish(name: str, tensor: Tensor) -> Tensor:
        seen.append(name)
        return tensor.bfloat16()

    t = torch.ones(2)
    tied = [same("e", "embed"), same("h", "embed", optional=True)]
    got = fill(tied, {"e": t, "h": t.clone()}, shapes(embed=t), finish)
    assert seen == ["embed"]
    assert got["embed"].dtype == torch.bfloat16


# -- tied heads (case H3) -------------------------------------------------------------------------------

TIED = [same("tok.weight", "embed.weight"), same("lm_head.weight", "embed.weight", optional=True)]
UNTIED = [same("tok.weight", "embed.weight"), same("lm_head.weight", "head.weight")]


@pytest.mark.parametrize("order", [1, -1])
def test_a_tied_head_may_be_absent_or_equal_but_not_different(order: int):
    e = torch.randn(5, 3)
    rules, want = TIED[::order], {"embed.weight": e.shape}
    assert torch.equal(fill(rules, {"tok.weight": e}, want)["embed.weight"], e)
    both = {"tok.weight": e, "lm_head.weight": e.clone()}
    assert torch.equal(fill(rules, both, want)["embed.weight"], e)
    both["lm_head.weight"][4, 2] += 1e-6
    with pytest.raises(
        ValueError, match=r"filled twice with different values: embed.weight by .*lm_head.weight"
    ):
        fill(rules, both, want)
    assert export(rules, {"embed.weight": e}).keys() == {"tok.weight"}


def test_an_untied_head_must_be_there():
    e = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"missing: head.weight \(from lm_head.weight\)"):
        fill(UNTIED, {"tok.weight": e}, {"embed.weight": e.shape, "head.weight": e.shape})


def test_an_optional_rule_alone_is_exported():
    bias = torch.randn(3)
    rules = [same("b", "bias", optional=True)]
    assert fill(rules, {}, {}) == {}
    assert torch.equal(export(rules, {"bias": bias})["b"], bias)


# -- faults ---------------------------------------------------------------------------------------------


def faulty(change: dict[str, Tensor | None], want_change: dict[str, Size | None] | None = None) -> str:
    """The message of a fill whose source (and wanted parameters) are changed so; None takes one away."""
    source = checkpoint()
    want: dict[str, Size | None] = {name: t.shape for name, t in expected(source).items()}
    changed = {name: t for name, t in {**source, **change}.items() if t is not None}
    want |= want_change or {}
    with pytest.raises(ValueError) as raised:
        fill(RULES, changed, {name: shape for name, shape in want.items() if shape is not None})
    return str(raised.value)


def test_all_faults_of_names_are_named_at_once():
    text = faulty(
        {
            "layers.0.q_norm.weight": torch.ones(1),
            "layers.1.q_norm.weight": torch.ones(1),
            "lm_head.weight": torch.ones(1),
            "layers.1.k": None,
            "layers.0.c_fc": None,
            "layers.2.c_fc": torch.ones(3, 8),
        }
    )
    assert "no rule takes: layers.{0-1}.q_norm.weight; lm_head.weight" in text
    assert "half of what a rule takes: layers.1.q + layers.1.v without layers.1.k" in text
    assert "missing: blocks.0.fc (from layers.0.c_fc)" in text
    assert "for a parameter that this model does not have: layers.2.c_fc (for blocks.2.fc)" in text


def test_a_parameter_that_no_rule_makes():
    assert "missing: blocks.0.extra (no rule makes it)" in faulty({}, {"blocks.0.extra": Size([1])})


def test_all_wrong_shapes_are_named_at_once():
    text = faulty(
        {
            "embed_tokens.weight": torch.ones(8, 3),
            "layers.0.q": torch.ones(2, 3),
            "layers.1.v": torch.ones(2, 4),
            "layers.0.conv": torch.ones(5, 2, 3),
            "layers.1.in_proj": torch.ones(7, 3),
            "layers.1.gate": torch.ones(5, 3),
        }
    )
    assert "embed_tokens.weight (8, 3) for embed.weight (7, 3)" in text
    assert (
        "layers.0.q + layers.0.k + layers.0.v: shapes [(2, 3), (2, 3), (2, 3)], wanted lengths [4, 2, 2]"
        in text
    )
    assert "(2, 4)]" in text
    assert "layers.0.conv: shape (5, 2, 3), wanted (-1, 1, 3)" in text
    assert "layers.1.in_proj: a length of 7 does not fall into parts of [5, 1]" in text
    assert "11 does not fall into 2 equal parts" in text


def test_names_are_checked_before_any_tensor_is_read():
    class Unread(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            raise AssertionError(f"{name} was read")

    with pytest.raises(ValueError, match="no rule takes: x"):
        fill([same("a", "a")], Unread(a=torch.ones(1), x=torch.ones(1)), {"a": Size([1])})


def test_export_names_what_it_cannot_write():
    with pytest.raises(
        ValueError, match=r"no rule writes: blocks.0.new; .*\n?.*half of what a rule writes: blocks.1.x"
    ):
        export(RULES, {"blocks.0.new": torch.ones(1), "other": torch.ones(1), "blocks.1.x": torch.ones(5, 3)})


def test_a_dot_in_a_pattern_is_a_dot():
    with pytest.raises(ValueError, match="no rule takes: axb"):
        fill([same("a.b", "c")], {"axb": torch.ones(1)}, {})


def test_rows_in_another_order_across_tensors():
    order = torch.tensor([3, 0, 4, 1, 2])
    rule = reorder(["layers.{i}.a", "layers.{i}.b"], ["blocks.{i}.x", "blocks.{i}.y"], order, [3, 2], [1, 4])
    source = {"layers.7.a": torch.randn(3, 5), "layers.7.b": torch.randn(2, 5)}
    rows = torch.cat(list(source.values()))
    want = {"blocks.7.x": rows[[3]], "blocks.7.y": rows[[0, 4, 1, 2]]}
    got = fill([rule], source, {name: t.shape for name, t in want.items()})
    assert got.keys() == want.keys() and all(torch.equal(got[name], t) for name, t in want.items())
    back = export([rule], got)
    assert back.keys() == source.keys() and all(torch.equal(back[name], t) for name, t in source.items())
    with pytest.raises(ValueError, match=r"wanted lengths \[3, 2\]"):
        fill([rule], source | {"layers.7.b": torch.ones(3, 5)}, {name: t.shape for name, t in want.items()})


EXPERTS = [stack(["layers.{i}.mlp.{e}.gate", "layers.{i}.mlp.{e}.up"], "blocks.{i}.up", 12)]


def experts() -> dict[str, Tensor]:
    names = (f"layers.{i}.mlp.{e}.{part}" for i in range(2) for e in range(12) for part in ("up", "gate"))
    return {name: torch.randn(3, 5) for name in names}


def test_experts_are_stacked_by_number_and_not_by_name():
    source = experts()
    want = {
        f"blocks.{i}.up": torch.stack(
            [torch.cat([source[f"layers.{i}.mlp.{e}.{part}"] for part in ("gate", "up")]) for e in range(12)]
        )
        for i in range(2)
    }
    sizes = {name: t.shape for name, t in want.items()}
    got = fill(EXPERTS, source, sizes)
    assert got.keys() == want.keys() and all(torch.equal(got[name], t) for name, t in want.items())
    back = export(EXPERTS, got)
    assert back.keys() == source.keys() and all(torch.equal(back[name], t) for name, t in source.items())


def test_experts_that_do_not_fit_are_named():
    sizes = {f"blocks.{i}.up": Size((12, 6, 5)) for i in range(2)}
    source = experts()
    del source["layers.1.mlp.10.up"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.0\.gate.* 19 more without layers\.1\.mlp\.10\.up"):
        fill(EXPERTS, source, sizes)
    with pytest.raises(ValueError, match=r"no rule takes: layers\.0\.mlp\.12\.up"):
        fill(EXPERTS, experts() | {"layers.0.mlp.12.up": torch.ones(3, 5)}, sizes)
    with pytest.raises(ValueError, match=r"\(3, 5\) and \(4, 5\) cannot be stacked"):
        fill(EXPERTS, experts() | {"layers.0.mlp.3.up": torch.ones(4, 5)}, sizes)
    with pytest.raises(ValueError, match=r"missing: blocks\.0\.up \(from layers\.0\.mlp\.\*\.gate, "):
        fill(EXPERTS, {n: t for n, t in experts().items() if ".1.mlp" in n}, sizes)
