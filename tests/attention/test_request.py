"""Errors of attend for bad input: they name the value that was got, the one expected, and the remedy."""

import pytest
import torch

import locant
from locant.attention.build import build
from locant.attention.request import prepare
from tests import cases


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "tisa"}, TypeError, r"must be a locant Scheme or None, got str; build it once with locant.scheme"),
        ({"q_pos": torch.arange(9).float()}, TypeError, r"q_pos must hold integers, got torch.float32"),
        ({"k_pos": torch.ones(9, dtype=torch.bool)}, TypeError, r"k_pos must hold integers, got torch.bool"),
        ({"q_pos": [0, 1]}, TypeError, r"q_pos must be a tensor of integers, got list"),
        ({"q_pos": torch.arange(8)}, ValueError, r"q_pos must be \[9\], or \[2, 9\] .*; got \[8\]"),
        ({"k_pos": torch.zeros(3, 9, dtype=torch.long)}, ValueError, r"k_pos must be \[9\], or .*; got \[3, 9\]"),
        ({"mask": torch.ones(2, 9)}, TypeError, r"mask must be bool, True where .* allowed, got torch.float32"),
        ({"mask": [[True] * 9] * 2}, TypeError, r"mask must be bool, True where .* allowed, got list"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, ValueError, r"mask must be \[2, 9\] .* 4, 9, 9\]; got \[2, 8\]"),
        ({"mask": torch.ones(2, 9, 9, dtype=torch.bool)}, ValueError, r"mask must be .*; got \[2, 9, 9\]"),
        ({"mask": torch.ones(2, 3, 9, 9, dtype=torch.bool)}, ValueError, r"mask must be .*; got \[2, 3, 9, 9\]"),
        ({"scale": float("nan")}, TypeError, r"scale must be a finite number, got nan"),
        ({"scale": float("inf")}, TypeError, r"scale must be a finite number, got inf"),
        ({"scale": -float("inf")}, TypeError, r"scale must be a finite number, got -inf"),
        ({"scale": torch.ones(())}, TypeError, r"scale must be a finite number, got tensor"),
        ({"causal": "false"}, TypeError, r"causal must be True or False, got 'false'"),
        ({"q_pos": torch.arange(9).to(torch.uint64)}, TypeError, r"q_pos must hold integers, got torch.uint64"),
        ({"dropout": -0.1}, ValueError, r"dropout must be at least 0 and below 1, got -0.1"),
        ({"scale": "1"}, TypeError, r"scale must be a finite number, got '1'"),
        ({"scheme": 7}, TypeError, r"must be a locant Scheme or None, got int$"),
        ({"mask": torch.ones(2, 9, dtype=torch.bool, device="meta")}, ValueError, r"device of q, cpu; got meta"),
        ({"q_pos": torch.arange(9, device="meta")}, ValueError, r"q_pos must be on the device of q, cpu; got meta"),
        ({"q_pos": torch.zeros(1, 2, 9, dtype=torch.long)}, ValueError, r"q_pos must be .*; got \[1, 2, 9\]"),
        ({"dropout": 1.0}, ValueError, r"dropout must be at least 0 and below 1, got 1.0"),
        ({"impl": "flash"}, ValueError, r"unknown impl 'flash'; choose one of: auto, fused, triton, sdpa, flex, eager"),
        ({"impl": "sdpa", "need_weights": True}, ValueError, r"impl='sdpa' cannot do this: it does not return weights"),
    ],
)  # fmt: skip
def test_attend(arguments, error, message):
    with pytest.raises(error, match=message):
        locant.attend(*cases.tensors(), **arguments)


def test_tensors_that_do_not_fit():
    q, k, v = cases.tensors()
    with pytest.raises(ValueError, match=r"must be \[batch, heads, length, head size\]; got q \[4, 9, 8\]"):
        locant.attend(q[0], k, v)
    with pytest.raises(TypeError, match=r"must have one dtype out of float32, .*; got torch.float32, torch.float64"):
        locant.attend(q.float(), k, v)
    with pytest.raises(TypeError, match="must have one dtype"):
        locant.attend(q.long(), k.long(), v.long())
    with pytest.raises(ValueError, match="query heads must be a multiple of the key/value heads"):
        locant.attend(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="one batch size"):
        locant.attend(q[:1], k, v)
    with pytest.raises(ValueError, match="one head size"):
        locant.attend(q[..., :4], k, v)
    with pytest.raises(ValueError, match="at least one head"):
        locant.attend(q[:, :0], k[:, :0], v[:, :0])
    with pytest.raises(ValueError, match="no keys to attend to"):
        locant.attend(q[:, :, :0], k[:, :, :0], v[:, :, :0])


def test_a_scheme_for_another_model():
    q, k, v = cases.tensors()
    with pytest.raises(ValueError, match=r"tisa was built for 6 heads, q has 4; build it with n_heads=4"):
        locant.attend(q, k, v, locant.scheme("tisa", n_heads=6))
    with pytest.raises(ValueError, match=r"huang4 was built for head size 16, q has 8; build it with head_dim=8"):
        locant.attend(q, k, v, locant.scheme("huang4", n_heads=4, head_dim=16))
    with pytest.raises(ValueError, match=r"cope was built for head size 16, q has 8"):
        locant.attend(q, k, v, locant.scheme("cope", n_heads=4, head_dim=16))
    with pytest.raises(ValueError, match=r"rope was built for head size 16, q has 8; build it with head_dim=8"):
        locant.attend(q, k, v, locant.scheme("rope", head_dim=16))


def test_an_ambiguous_mask_is_not_guessed():
    q, k, v = cases.tensors(b=3, lq=3, lk=5)
    mask = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"could be \[batch, keys\] or \[queries, keys\], as both are 3; write mask\["):
        locant.attend(q, k, v, mask=mask)
    locant.attend(q, k, v, mask=mask[:, None, None, :])


def test_masks_for_another_batch():
    q, k, v = cases.tensors(b=3, lq=5, lk=9)
    for rows in (2, 4):
        with pytest.raises(ValueError, match=rf"mask must be \[3, 9\] .*; got \[{rows}, 9\]"):
            locant.attend(q, k, v, mask=torch.ones(rows, 9, dtype=torch.bool))


def test_positions_of_queries_are_those_of_the_keys_if_there_are_as_many():
    q, k, v = cases.tensors()
    pos, scheme = torch.randint(0, 20, (2, 9)), cases.build("tisa")
    expected = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos)
    torch.testing.assert_close(locant.attend(q, k, v, scheme, q_pos=pos), expected)


def test_positions_of_keys_end_with_those_of_the_queries():
    q, k, v = cases.tensors(lq=3)
    pos, scheme = torch.randint(0, 20, (2, 9)), cases.build("tisa")
    expected = locant.attend(q, k, v, scheme, q_pos=pos[:, 6:], k_pos=pos)
    torch.testing.assert_close(locant.attend(q, k, v, scheme, k_pos=pos), expected)


@pytest.mark.parametrize("impl", ["auto", "eager", "sdpa"])
def test_a_score_is_a_bias_inside_the_scale(impl):
    score, bias = torch.randn(4, 17, dtype=torch.float64), torch.randn(4, 17, dtype=torch.float64)

    class Both(locant.Scheme):
        def __init__(self, *, inside):
            super().__init__()
            self.inside = inside

        def terms(self, r):
            return locant.Terms(bias=bias, score=score) if self.inside else locant.Terms(bias=bias + 0.7 * score)

    tensors = cases.tensors()
    ours, expected = (locant.attend(*tensors, Both(inside=x), scale=0.7, impl=impl) for x in (True, False))
    torch.testing.assert_close(ours, expected)


def test_positions_that_cannot_be_guessed():
    q, k, v = cases.tensors(lq=5, lk=3)
    with pytest.raises(ValueError, match="cannot infer positions for 5 queries over 3 keys; pass q_pos and k_pos"):
        locant.attend(q, k, v)
    with pytest.raises(ValueError, match="cannot infer positions of 3 keys from q_pos for 5 queries; pass k_pos"):
        locant.attend(q, k, v, q_pos=torch.arange(5))


def test_positions_past_a_learned_table():
    scheme = locant.scheme("learned:length=8", d_model=4)
    with pytest.raises(
        ValueError, match=r"position 8 is outside the table \(0 … 7\); use learned:length=9 or a scheme"
    ):
        scheme.embed(torch.arange(9))
    with pytest.raises(ValueError, match=r"position -1 is outside the table"):
        scheme.embed(torch.tensor([-1, 3]))


def test_a_scheme_whose_terms_are_wrong():
    class Short(locant.Scheme):
        def terms(self, r):
            return locant.Terms(bias=torch.zeros(1, 3))

    class Half(locant.Scheme):
        def terms(self, r):
            return locant.Terms(bias=torch.zeros(1, len(r), dtype=torch.bfloat16))

    def scheme(**shapes):
        class Shaped(locant.Scheme):
            def terms(self, r):
                return locant.Terms(**{name: torch.zeros(shape) for name, shape in shapes.items()})

        return Shaped()

    for shapes, message in (
        ({"bias": (17,)}, r"bias must have a column for each of the 17 offsets, got \[17\]"),
        ({"bias": (3, 17)}, r"bias must be for 1 head \(shared\) or 4, got \[3, 17\]"),
        ({"bias": (1, 17, 8)}, r"bias must be \[H, R\], got \[1, 17, 8\]"),
        ({"gain": (1, 17, 7)}, r"gain must have the head size of q, 8; got \[1, 17, 7\]"),
        ({"query": (1, 17)}, r"query must be \[H, R, D\], got \[1, 17\]"),
        ({"key": (4, 17, 9)}, r"key must have the head size of q, 8; got \[4, 17, 9\]"),
        ({"value": (1, 17, 9)}, r"value must have the head size of v, 8; got \[1, 17, 9\]"),
    ):
        with pytest.raises(ValueError, match=message):
            locant.attend(*cases.tensors(), scheme(**shapes))
    with pytest.raises(ValueError, match="bias must have a column for each of the 17 offsets"):
        locant.attend(*cases.tensors(), Short())
    with pytest.raises(TypeError, match=r"bias is torch.bfloat16 but must be float32 or wider"):
        locant.attend(*cases.tensors(), Half())


def test_rotations_may_not_narrow():
    class Narrow(locant.Scheme):
        def rotate(self, q, k, q_pos, k_pos):
            return q, k.half()

    message = r"narrow\.rotate must return keys in torch\.float32 or a wider dtype, got torch\.float16"
    with pytest.raises(TypeError, match=message):
        locant.attend(*cases.tensors(dtype=torch.float32), Narrow())


@pytest.mark.parametrize("impl", ["eager", "fused", "auto"])
def test_values_may_have_another_size_than_queries(impl):
    """A value term has the size of the values."""

    class Added(locant.Scheme):
        def __init__(self, size):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(4, 17, size))

        def terms(self, r):
            return locant.Terms(value=self.table)

    q, k, v = (x.float() for x in cases.tensors())
    if impl == "fused" and build().library is None:
        pytest.skip(f"no kernel here: {build().why}; returns with a C compiler")
    wide = torch.cat([v, v[..., :3]], dim=-1)  # size 11
    scheme = Added(11)
    out = locant.attend(q, k, wide, scheme, impl=impl)
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    r = torch.arange(9)[None, :] - torch.arange(9)[:, None] + 8
    expected = torch.einsum("bhij,bhijd->bhid", weights, wide[:, :, None] + scheme.table[:, r])
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match=r"value must have the head size of v, 11; got \[4, 17, 8\]"):
        locant.attend(q, k, wide, Added(8), impl=impl)


@pytest.mark.parametrize("impl", ["eager", "fused", "sdpa", "auto"])
def test_without_dropout_no_random_number_is_drawn(impl):
    if impl == "fused" and build().library is None:
        pytest.skip(f"no kernel here: {build().why}; returns with a C compiler")
    tensors, scheme = cases.tensors(dtype=torch.float32), cases.build("tisa").float()
    before = torch.get_rng_state()
    locant.attend(*tensors, scheme, impl=impl)
    assert torch.equal(torch.get_rng_state(), before)


POSITIONS = {
    "0 …": [0, 1, 2, 3, 4],
    "5 …": [5, 6, 7, 8, 9],
    "reversed": [4, 3, 2, 1, 0],
    "every second": [0, 2, 4, 6, 8],
    "a gap": [0, 1, 2, 5, 6],
    "a restart": [0, 1, 2, 0, 1],
    "repeated": [1, 1, 1, 1, 1],
}
SHIFTS = [
    ([0], [0]), ([0], [1]), ([0], [2]), ([1], [0]),
    ([0, 7], [0, 7]), ([0, 1], [0, 1]), ([0, 0], [0, 1]), ([0, 1], [0, 0]),
]  # fmt: skip


@pytest.mark.parametrize("impl", ["eager", "fused", "sdpa", "auto"])
@pytest.mark.parametrize("queries", POSITIONS)
def test_any_positions_of_queries_and_keys(impl, queries):
    """One row of positions for all sequences, or one for each, against the sum over pairs."""
    if impl == "fused" and build().library is None:
        pytest.skip(f"no kernel here: {build().why}; returns with a C compiler")
    scheme = cases.build("toeplitz:clip=20").float()
    q, k, v = cases.tensors(lq=5, lk=5, dtype=torch.float32)
    for other in POSITIONS.values():
        one = torch.tensor([POSITIONS[queries], other])
        # The same distance in both sequences, and another one in each.
        for shift_q, shift_k in SHIFTS:
            q_pos, k_pos = (
                row + torch.tensor(shift)[:, None] for row, shift in zip(one, (shift_q, shift_k), strict=True)
            )
            r = k_pos[:, None, :] - q_pos[:, :, None]
            for causal in (False, True):
                logits = q @ k.mT / 8**0.5 + scheme.table[:, r + 20].transpose(0, 1)
                if causal:
                    logits = logits.masked_fill((r > 0)[:, None], -torch.inf)
                expected = logits.softmax(-1).nan_to_num() @ v  # zeros where no key is visible
                out = locant.attend(q, k, v, scheme, q_pos=q_pos, k_pos=k_pos, causal=causal, impl=impl)
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widened", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("impl", ["eager", "sdpa", "auto"])
def test_rotations_may_widen_queries_or_keys(widened, impl):
    """One of them in float64 is enough for the product to be in float64."""

    class Wider(locant.Scheme):
        def rotate(self, q, k, q_pos, k_pos):
            return tuple((2 * x).double() if wide else 2 * x for x, wide in zip((q, k), widened, strict=True))

    tensors = cases.tensors(dtype=torch.float32)
    request = prepare(*tensors, Wider())
    assert request.content_dtype == (torch.float64 if any(widened) else torch.float32)
    assert request.wide == torch.float32
    out = locant.attend(*tensors, Wider(), impl=impl)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, locant.attend(*tensors, scale=4 / 8**0.5, impl="eager"))
