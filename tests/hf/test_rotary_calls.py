"""Calls of rotary modules: what counts as rotations, and what they are at other positions."""

import pytest
import torch
from torch import nn

from locant.hf.rotary_calls import RotaryCall, is_rotary_form, layer_type_of, positions_of, sources, turns_of

ANGLES = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 0.01])


def call(output, path="rotary_emb", **kwargs):
    return RotaryCall(path, nn.Identity(), (), kwargs, output)


def cos_and_sin(angles, magnitude=1.0, dtype=torch.float32):
    return (magnitude * angles.cos()).to(dtype), (magnitude * angles.sin()).to(dtype)


def test_turns_are_complex_numbers_of_full_precision_whatever_a_module_returns():
    wanted = torch.polar(torch.full_like(ANGLES, 1.5, dtype=torch.float64), ANGLES.double())
    for output in (cos_and_sin(ANGLES, 1.5), wanted.to(torch.complex64), cos_and_sin(ANGLES[None], 1.5)):
        found = turns_of(output)
        assert found.dtype == torch.complex128
        assert found.shape == (1, 5, 3)
        torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-6)


def test_outputs_of_another_form():
    cos, sin = cos_and_sin(ANGLES)
    assert is_rotary_form((cos, sin))
    assert is_rotary_form([cos, sin])
    assert is_rotary_form(torch.complex(cos, sin))
    for other in (cos, (cos,), (cos, sin, sin), (cos, sin[1:]), (cos, None), (cos.long(), sin.long()), None):
        assert not is_rotary_form(other)


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_of_any_magnitude_are_found_also_rounded(magnitude, dtype):
    one = call(cos_and_sin(ANGLES, magnitude, dtype))
    assert sources([one], 5) == [one]


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 8.0])
def test_what_is_no_rotation_by_position(magnitude):
    cos, sin = cos_and_sin(ANGLES, magnitude)
    others = {
        "moduli that differ by a tenth": (1.1 * cos, sin),
        "the same at every position": (cos[:1].expand(5, 3), sin[:1].expand(5, 3)),
        "zeros": (0 * cos, 0 * sin),
        "nothing": (cos[:, :0], sin[:, :0]),
        "two random tensors": (torch.randn(5, 3), torch.randn(5, 3)),
        "no pair": cos,
    }
    for what, output in others.items():
        assert sources([call(output)], 5) == [], what
    assert sources([call((cos, sin))], 4) == []  # rows of another length


def test_a_module_that_hands_on_what_another_made_is_no_source():
    first, other = call(cos_and_sin(ANGLES)), call(cos_and_sin(2 * ANGLES))
    again = call(first.output, path="layers.0")
    assert sources([first, again, other], 5) == [first, other]


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, position_ids, layer_type=""):
        self.calls += 1
        angles = position_ids[..., None].to(x.dtype) * torch.tensor([1.0, 0.01], dtype=x.dtype)
        return angles.cos(), angles.sin()


def test_a_module_is_asked_for_its_angles_at_other_positions():
    module, ids = Turning(), torch.arange(4)[None]
    x = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    one = RotaryCall("rotary_emb", module, (x, ids), {"layer_type": "full"}, module(x, ids))
    assert (one.layer_type, one.columns, one.positions is ids) == ("full", 2, True)
    far = one.at(torch.tensor([1000, 5]))  # 1000 in bfloat16 would be off by a whole turn
    angles = torch.tensor([[1000.0, 10.0], [5.0, 0.05]]).double()
    torch.testing.assert_close(far, torch.polar(torch.ones_like(angles), angles), rtol=0, atol=1e-4)
    assert module.calls == 1  # a copy was asked


def test_columns_of_pairs():
    turns = turns_of(cos_and_sin(ANGLES))[0]
    one = call(cos_and_sin(torch.cat([ANGLES, ANGLES], -1)))
    halves, neighbours = torch.cat([turns, turns], -1), turns.repeat_interleave(2, -1)
    assert torch.equal(one.of_pairs(halves, 3), turns)
    assert torch.equal(one.of_pairs(neighbours, 3), turns)
    assert torch.equal(one.of_pairs(halves, 6), halves)
    assert one.of_pairs(halves, 4) is None
    assert one.of_pairs(torch.cat([turns, 2 * turns], -1), 3) is None


def test_arguments_that_name_positions_and_layers():
    ids = torch.arange(3)
    assert positions_of((torch.zeros(3), ids), {}) is ids
    assert positions_of((), {"x": torch.zeros(3), "seq_len": torch.tensor(3), "ids": ids}) is ids  # no number alone
    assert positions_of((torch.zeros(3), torch.zeros(3, dtype=torch.complex64), 3), {}) is None
    assert layer_type_of((ids, "sliding"), {"layer_type": "full"}) == "sliding"
    assert layer_type_of((ids,), {"layer_type": "full"}) == "full"
    assert layer_type_of((ids,), {}) == ""
