"""The tensor operations of the fuzzer's reference against the loops of `tests.oracles`."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from locant.schemes.base import DIMS
from reliability.fuzz import reference
from reliability.fuzz.inputs import parts_of
from reliability.fuzz.problem import Arithmetic, Part, Problem
from tests import cases, frontier_cases, frontier_oracles, oracles

SUMS = [
    "rope+tisa",
    "huang1:clip=3+huang2:clip=2,heads=shared+huang3:clip=2",
    "huang3:clip=2+rope:layout=interleaved+alibi",
    "xpos:base=20+rope:layout=half",
    "shaw:clip=3+shaw:clip=1,heads=own+xl",
    "cope:positions=4+fire:width=6,length=4+rope",
    "deberta:buckets=4,max_distance=8+t5:buckets=8,max_distance=12+learned:length=9",
]


def problem(scheme, q, k, v, q_pos, k_pos, visible, scale):
    return Problem(tuple(detached(part) for part, _ in parts_of(scheme)), q, k, v, q_pos, k_pos, visible, scale)


WITHOUT_SPEEDS = [spec for spec in cases.NAMES if "scaling=table" not in spec and "longrope" not in spec]
"""Specs whose tensors are all parameters."""


def detached(part):
    return replace(part, params={name: x.detach() for name, x in part.params.items()})


def by_loops(scheme, p):
    arrays = [x.numpy() for x in (p.q, p.k, p.v)]
    rows = [pos.expand(p.q.shape[0], -1).numpy() for pos in (p.q_pos, p.k_pos)]
    rest = (p.softcap, None if p.sinks is None else p.sinks.numpy())
    parts = []
    for part in scheme.parts_of_sum():
        defaults = {name: x.default for name, x in part.arguments().items() if name not in DIMS}
        params = {name: x.detach().numpy() for name, x in (*part.named_parameters(), *part.named_buffers())}
        parts.append(oracles.Part(part.name(), params, {**defaults, **part.options()}))
    if len(parts) == 1:
        return oracles.attention(parts[0].name, *arrays, *rows, p.visible.numpy(), p.scale, *parts[0][1:], *rest)
    return oracles.attention_of_sum(parts, *arrays, *rows, p.visible.numpy(), p.scale, *rest)


@pytest.mark.parametrize(
    ("spec", "softcap", "sinks"),
    [*((spec, 1.5, True) for spec in (*cases.SPECS, *SUMS)), *((spec, None, False) for spec in SUMS)],
)
def test_equal_to_the_loops(spec, softcap, sinks):
    scheme = cases.build(spec)
    q, k, v = cases.tensors(kv=2, lq=4, lk=6)
    q_pos = torch.tensor([[5, 0, 3, 40], [2, 2, -3, 7]])
    k_pos = torch.tensor([[5, 0, 3, 40, 1, 1], [2, 2, -3, 7, 30, 9]])
    visible = (torch.rand(2, 4, 4, 6) < 0.7) & (torch.arange(4) != 2)[:, None]  # query 2 sees nothing
    p = problem(scheme, q, k, v, q_pos, k_pos, visible, 0.4)
    p = replace(p, softcap=softcap, sinks=torch.tensor([-2.0, 0.0, 1.0, 6.0]).double() if sinks else None)
    out, weights = reference.attention(p, Arithmetic())
    for got, expected in zip((out, weights), by_loops(scheme, p), strict=True):
        torch.testing.assert_close(got, torch.from_numpy(np.asarray(expected)), rtol=1e-10, atol=1e-12)


def test_the_slope_of_a_softcap_keeps_its_digits_where_tanh_is_flat():
    x = torch.tensor([-40.0, -20.0, -1.0, 0.0, 0.5, 20.0, 40.0], dtype=torch.float64, requires_grad=True)
    exact = 4 * torch.exp(-2 * x.abs()) / (1 + torch.exp(-2 * x.abs())) ** 2
    (slope,) = torch.autograd.grad(reference._tanh(x, Arithmetic()).sum(), x)
    torch.testing.assert_close(slope, exact.detach(), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(reference._tanh(x, Arithmetic()), torch.tanh(x), rtol=1e-14, atol=1e-16)


def distinct(length):
    """Positions of two rows, in any order, none twice."""
    return torch.tensor([[7, 0, 3, 40, 1, 2], [2, 20, -3, 7, 30, 9]])[:, :length]


def in_order(spec):
    """A problem whose queries are the last three of the keys, with hidden states, and its scheme."""
    scheme = cases.build(spec)
    q, k, v = cases.tensors(kv=4, lq=3, lk=6)
    x, k_pos = frontier_cases.states(length=6), distinct(6)
    q_pos = k_pos[:, 3:]
    visible = (k_pos[:, None, :] <= q_pos[:, :, None])[:, None].expand(2, 4, -1, -1)
    return scheme, replace(problem(scheme, q, k, v, q_pos, k_pos, visible, 0.4), x_q=x[:, 3:], x_k=x)


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_schemes_that_read_tokens_are_equal_to_the_loops(spec):
    scheme, p = in_order(spec)
    logits = frontier_cases.logits(scheme, p.q, p.k, p.x_k, p.q_pos, p.k_pos, p.scale)
    expected = frontier_oracles.attention(logits.numpy(), p.v.numpy(), p.visible.numpy())
    for got, each in zip(reference.attention(p, Arithmetic()), expected, strict=True):
        torch.testing.assert_close(got, torch.from_numpy(each), rtol=1e-10, atol=1e-12)


MAPPED = {
    "interpolated:factor=1.5": lambda r: r / 1.5,
    "grouped:size=3": lambda r: np.sign(r) * (abs(r) // 3),
    "recurrent:length=4": lambda r: np.sign(r) * (abs(r) % 4),
    "selfextend:window=5,size=2": lambda r: r if abs(r) <= 5 else np.sign(r) * (5 + (abs(r) - 5) // 2),
}
POSITIONS = {
    "interpolated:factor=1.5": lambda pos: frontier_oracles.interpolated(pos, 1.5),
    "grouped:size=3": lambda pos: frontier_oracles.grouped(pos, 3),
    "recurrent:length=4": lambda pos: frontier_oracles.recurrent(pos, 4),
}


@pytest.mark.parametrize("map_", MAPPED)
def test_maps_of_tables_and_rotations_are_equal_to_the_loops(map_):
    """A formula, a table that real offsets interpolate, and a rotation."""
    biases = {
        "alibi": lambda table, h, r: -oracles.alibi_slopes(4)[h] * abs(r),
        "toeplitz:clip=8": lambda table, h, r: np.interp(r, range(-8, 9), table[h]),
        "rope": None,
    }
    for spec, bias in biases.items():
        scheme, p = in_order(f"{spec}@{map_}")
        table = next((x.detach().numpy() for x in scheme.parameters()), None)
        rows = []
        for row in range(2):
            pos = [x[row].tolist() for x in (p.q_pos, p.k_pos)]
            q, k = p.q[row : row + 1].numpy(), p.k[row : row + 1].numpy()
            if bias is not None:
                at = partial(bias, table)
                rows.append(frontier_oracles.logits(q, k, *pos, p.scale, b=lambda h, r, at=at: at(h, MAPPED[map_](r))))
            elif map_ in POSITIONS:
                rows.append(frontier_oracles.rope(q, k, *map(POSITIONS[map_], pos), p.scale))
            else:
                rows.append(frontier_oracles.self_extend_rope(q, k, *pos, p.scale, window=5, size=2))
        expected = frontier_oracles.attention(np.concatenate(rows), p.v.numpy(), p.visible.numpy())[0]
        torch.testing.assert_close(
            reference.attention(p, Arithmetic())[0], torch.from_numpy(expected), rtol=1e-10, atol=1e-12
        )


def test_the_gates_of_hidden_keys_do_not_count_and_repeated_positions_go_by_index():
    _, p = in_order("fox")
    hidden = torch.tensor([[False, True, False, False, False, False]])
    p = replace(p, hidden=hidden, q_pos=torch.tensor([[0, 1, 2]]), k_pos=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    (part,) = p.parts
    added = reference.ADDED["fox"](p, Arithmetic(), part, p.k)
    gates = frontier_oracles.fox_log_gates(p.x_k.numpy(), part.params["gate"].numpy(), part.params["bias"].numpy())
    gates[:, :, 1] = 0.0
    sums = gates.cumsum(-1)
    expected = torch.from_numpy(sums[:, :, 3:, None] - sums[:, :, None, :])
    torch.testing.assert_close(added, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", WITHOUT_SPEEDS)
def test_gradients_are_those_of_finite_differences(spec):
    scheme = cases.build(spec, n_heads=2, head_dim=4, d_model=8)
    tensors = cases.tensors(b=1, h=2, kv=1, lq=3, lk=3, d=4)
    pos = torch.tensor([[0, 1, 3]])
    p = problem(scheme, *tensors, pos, pos, torch.ones(1, 2, 3, 3, dtype=torch.bool).tril(), 0.4)
    (part,) = p.parts

    def attention(q, k, v, *params):
        parts = (Part(part.name, dict(zip(part.params, params, strict=True)), part.options),)
        return reference.attention(Problem(parts, q, k, v, pos, pos, p.visible, p.scale), Arithmetic())[0]

    leaves = [x.clone().requires_grad_() for x in (*tensors, *part.params.values())]
    assert torch.autograd.gradcheck(attention, leaves, fast_mode=True)


@pytest.mark.parametrize("spec", ["learned:length=64", "sinusoidal:theta=50", "sinusoidal:amplitude=0.02", "first"])
def test_embeddings(spec):
    scheme = cases.build(spec)
    ((part, _),) = parts_of(scheme)
    part = detached(part)
    pos = torch.tensor([[0, 5, 63], [1, 1, 2]])
    got = reference.embedding(part, pos, cases.D_MODEL, Arithmetic())
    params = {name: x.numpy() for name, x in part.params.items()}
    for index, p in np.ndenumerate(pos.numpy()):
        e = oracles.EMBEDDINGS[part.name](params, part.options, cases.D_MODEL, int(p))
        torch.testing.assert_close(got[index], torch.from_numpy(e), rtol=1e-12, atol=1e-12)


def test_the_plain_computation_rounds_as_much_as_its_dtype():
    """Neither exact nor far off: about one unit in the last place of each dtype."""
    scheme = cases.build("tisa")
    pos, everything = torch.arange(9)[None], torch.ones(2, 4, 9, 9, dtype=torch.bool)
    p = problem(scheme, *cases.tensors(), pos, pos, everything, 0.4)
    truth, _ = reference.attention(p, Arithmetic())
    for dtype, stored in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
        a = Arithmetic(dtype, stored, torch.Generator().manual_seed(0))
        narrow = Problem(
            tuple(Part(x.name, {n: y.to(dtype) for n, y in x.params.items()}, x.options) for x in p.parts),
            *(x.to(dtype) for x in (p.q, p.k, p.v)), p.q_pos, p.k_pos, p.visible, p.scale,
        )  # fmt: skip
        error = (reference.attention(narrow, a)[0].double() - truth).abs().max() / truth.abs().max()
        assert 0.05 < error / torch.finfo(stored).eps < 20
