"""The two forms of a channel's decay, which are easily taken for one another (case F7)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from constate.core.decay import bounded_decay, softplus_decay
from constate.kernels import reference
from constate.kernels.chunked import gated_delta
from tests.kernels import hostile
from tests.kernels.test_gated_delta import draw, loop

OPS = {"chunked": gated_delta, "reference": reference}
H, DK = 4, 8


def test_the_forms_at_zero() -> None:
    zero = torch.zeros(1)
    assert softplus_decay(zero, zero, zero).item() == pytest.approx(-0.693147, abs=1e-6)
    assert bounded_decay(zero, zero, zero, -5.0).item() == -2.5


def test_the_forms_far_out() -> None:
    """A large drive takes the one to its bound and the other anywhere; a small one takes both to no decay.
    Rates multiply the softplus, and what is inside the sigmoid."""
    x, two = torch.tensor([-60.0, 60.0]), torch.full((1,), math.log(2))
    zero = torch.zeros(1)
    assert softplus_decay(x, two, zero).tolist() == pytest.approx([0.0, -120.0], abs=1e-6)
    assert bounded_decay(x, two, zero, -5.0).tolist() == pytest.approx([0.0, -5.0], abs=1e-6)
    one = torch.ones(1)
    assert softplus_decay(one, two, one).item() == pytest.approx(-2 * math.log(1 + math.e**2), abs=1e-6)
    assert bounded_decay(one, two, one, -5.0).item() == pytest.approx(-5 / (1 + math.exp(-4)), abs=1e-6)


def test_half_drives_are_computed_in_float32() -> None:
    x, a_log, bias = torch.randn(3, H, DK).bfloat16(), torch.randn(H, 1), torch.randn(H, DK)
    for decay in (softplus_decay(x, a_log, bias), bounded_decay(x, a_log, bias, -5.0)):
        assert decay.dtype == torch.float32
    assert torch.equal(softplus_decay(x, a_log, bias), softplus_decay(x.float(), a_log, bias))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [(1, 70, 0, 17), (33, 33)])
def test_the_op_under_bounded_decays(lengths: tuple[int, ...], op: str) -> None:
    """The scan beside a float64 loop whose decay is the bounded form written out; under the other form, with
    the same parameters, it is far from it."""
    x, initial, spans = draw(lengths, vector=True)
    drive, bias = hostile.normal(spans.total, H, DK, seed=11, scale=4.0), hostile.normal(H, DK, seed=12)
    a_log = torch.linspace(-2, 2, H)[:, None]
    inside = (drive.double() + bias.double()) * a_log.double().exp()
    want, last = loop(x._replace(g=-5 / (1 + torch.exp(-inside))), initial, spans)

    def run(g: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _, beta = x
        return OPS[op].gated_delta_scan(q, k, v, g, beta, initial, spans, scale=0.3, checked=True)

    o, final = run(bounded_decay(drive, a_log, bias, -5.0))
    hostile.assert_output(o, want)
    hostile.assert_state(final, last)
    with pytest.raises(AssertionError, match="off by"):
        hostile.assert_output(run(softplus_decay(drive, a_log, bias))[0], want)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_forms_are_transformers(bound: float | None) -> None:
    """The one published model there that has both, by the key of its config."""
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = SimpleNamespace(linear_head_dim=DK, linear_num_heads=H, hidden_size=20, linear_lower_bound=bound)
    gate = modeling.Glm5NextTextForgetGate(config).requires_grad_(False)
    for p in gate.parameters():
        p.normal_()
    x = torch.randn(1, 30, 20)
    drive, bias = gate.f_b_proj(gate.f_a_proj(x))[0].unflatten(-1, (H, DK)), gate.dt_bias.view(H, DK)
    a_log = gate.A_log[:, None]
    ours = softplus_decay(drive, a_log, bias) if bound is None else bounded_decay(drive, a_log, bias, bound)
    assert torch.allclose(ours, gate(x)[0], rtol=1e-5, atol=1e-6)
