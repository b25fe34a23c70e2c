"""Maps of positions and offsets: against loops in float64, as specs, and their refusals."""

import copy
import math

import pytest
import torch

import locant
from locant.attention import eager, tables
from locant.attention.request import prepare
from locant.schemes import Grouped, Interpolated, Map, Recurrent, Rope, SelfExtend, Sum, Tisa
from locant.schemes.map import _first
from locant.terms import Sides, Terms
from locant.testing import check_scheme
from tests import cases
from tests import frontier_oracles as oracles

DIMS = {"n_heads": cases.N_HEADS, "head_dim": cases.HEAD_DIM, "d_model": cases.D_MODEL}
Q_POS, K_POS = [3, 17, 30, 8, 25], [0, 1, 9, 16, 17, 18, 29, 40, 5]
EXACT = {"rtol": 1e-10, "atol": 1e-10}
POSITIONS = {
    "interpolated:factor=2.5": lambda pos: oracles.interpolated(pos, 2.5),
    "grouped:size=3": lambda pos: oracles.grouped(pos, 3),
    "recurrent:length=7": lambda pos: oracles.recurrent(pos, 7),
}


class Logarithmic(Map):
    """A map of the user's own: exact to 8, logarithmic beyond."""

    monotone = True

    def __init__(self, scheme, *, base: float = 2.0):
        super().__init__(scheme)
        self.base = base

    def positions(self, pos):
        far = 8 + torch.log(pos.clamp(min=8).double() / 8) / math.log(self.base)
        return torch.where(pos <= 8, pos.double(), far)


def given(lq=5, lk=9):
    torch.manual_seed(0)
    return cases.tensors(lq=lq, lk=lk)


def logits(scheme, q, k, v, q_pos=Q_POS, k_pos=K_POS):
    return eager.logits(prepare(q, k, v, scheme, q_pos=torch.tensor(q_pos), k_pos=torch.tensor(k_pos), scale=0.3))


# ---- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", POSITIONS)
def test_rotations_read_mapped_positions(text):
    q, k, v = given()
    expected = oracles.rope(q.numpy(), k.numpy(), POSITIONS[text](Q_POS), POSITIONS[text](K_POS), 0.3)
    torch.testing.assert_close(logits(cases.build(f"rope@{text}"), q, k, v), torch.tensor(expected), **EXACT)


@pytest.mark.parametrize(("window", "size"), [(8, 2), (6, 4), (5, 3), (3, 3), (50, 7), (8, 1)])
def test_self_extended_rotations_on_both_sides(window, size):
    q, k, v = given()
    scheme = cases.build(f"rope@selfextend:window={window},size={size}")
    expected = oracles.self_extend_rope(q.numpy(), k.numpy(), Q_POS, K_POS, 0.3, window=window, size=size)
    torch.testing.assert_close(logits(scheme, q, k, v), torch.tensor(expected), **EXACT)


def test_self_extended_xpos_decays_over_the_mapped_offset():
    q, k, v = given()
    scheme, xpos = cases.build("xpos:layout=half@selfextend:window=5,size=3"), cases.build("xpos:layout=half")
    got = logits(scheme, q, k, v)
    for m, i in enumerate(Q_POS):
        for n, j in enumerate(K_POS):
            at = oracles.self_extended_positions(i, j, 5, 3)
            one = logits(xpos, q[:, :, m : m + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], [at[0]], [at[1]])
            torch.testing.assert_close(got[:, :, m : m + 1, n : n + 1], one, **EXACT)


OFFSETS = {
    "interpolated:factor=2.5": lambda r: r / 2.5,
    "grouped:size=3": lambda r: oracles.sign(r) * (abs(r) // 3),
    "recurrent:length=7": lambda r: oracles.sign(r) * (abs(r) % 7),
    "selfextend:window=5,size=3": lambda r: r if abs(r) <= 5 else oracles.sign(r) * (5 + (abs(r) - 5) // 3),
}


def between(read, x):
    """A table at a real offset: on the line between its two neighbours."""
    below = math.floor(x)
    return read(below) if below == x else read(below) * (below + 1 - x) + read(below + 1) * (x - below)


@pytest.mark.parametrize("text", OFFSETS)
@pytest.mark.parametrize("name", ["tisa", "kerple", "toeplitz:clip=6", "shaw:clip=4", "huang3:clip=4"])
def test_tables_read_mapped_offsets(name, text):
    scheme = cases.build(f"{name}@{text}")
    assert set(scheme.state_dict()) == {f"scheme.{key}" for key in cases.build(name).state_dict()}
    state = {key.removeprefix("scheme."): value.double() for key, value in scheme.state_dict().items()}

    def clipped(table, clip):
        return lambda x: table[:, min(max(x, -clip), clip) + clip]

    def bumps(x):
        amplitude, sharpness, offset = (state[key] for key in ("amplitude", "sharpness", "offset"))
        return (amplitude * torch.exp(-sharpness.abs() * (x - offset) ** 2)).sum(1)

    read = {
        "tisa": bumps,
        "kerple": lambda x: -state["p"].abs() * torch.log(1 + state["a"].abs() * abs(x)),
        "toeplitz:clip=6": lambda x: between(clipped(state["table"], 6), x),
        "shaw:clip=4": lambda x: between(clipped(state["value_table"], 4), x),
        "huang3:clip=4": lambda x: between(clipped(state["table"], 4), x),
    }[name]  # fmt: skip
    r = torch.arange(-40, 41)
    terms = scheme.terms(r)
    got = next(x for x in (terms.value, terms.gain, terms.bias) if x is not None)
    for column, offset in enumerate(r.tolist()):
        torch.testing.assert_close(got[:, column], read(OFFSETS[text](offset)), **EXACT)


@pytest.mark.parametrize("text", POSITIONS)
def test_embeddings_read_mapped_positions(text):
    learned, sinusoidal = cases.build(f"learned:length=20@{text}"), cases.build(f"sinusoidal@{text}")
    pos = torch.tensor([[0, 1, 9], [16, 17, 49]])
    table = learned.state_dict()["scheme.table"]
    for row in range(2):
        for column in range(3):
            (x,) = POSITIONS[text]([int(pos[row, column])])
            expected = between(lambda n: table[n], x) if x < 19 else table[19]
            torch.testing.assert_close(learned.embed(pos)[row, column], expected, **EXACT)
            angles = torch.tensor([x * f for f in oracles.frequencies(cases.D_MODEL)], dtype=torch.float64)
            torch.testing.assert_close(sinusoidal.embed(pos)[row, column, 0::2], angles.sin(), **EXACT)
            torch.testing.assert_close(sinusoidal.embed(pos)[row, column, 1::2], angles.cos(), **EXACT)


def test_interpolated_rope_is_linear_scaling():
    q, k, v = given()
    ours, theirs = cases.build("rope@interpolated:factor=4"), cases.build("rope:scaling=linear,factor=4")
    torch.testing.assert_close(logits(ours, q, k, v), logits(theirs, q, k, v), **EXACT)


def test_pairs_read_mapped_positions():
    """FIRE is a function of the positions: at grouped positions it is FIRE of the groups."""
    q, k, v = given()
    scheme = cases.build("fire:width=6,length=4@grouped:size=3")
    expected = logits(scheme.scheme, q, k, v, oracles.grouped(Q_POS, 3), oracles.grouped(K_POS, 3))
    torch.testing.assert_close(logits(scheme, q, k, v), expected, **EXACT)
    real = cases.build("fire:width=6,length=4@interpolated:factor=1")
    torch.testing.assert_close(logits(real, q, k, v), logits(real.scheme, q, k, v), **EXACT)
    assert logits(copy.deepcopy(real).float(), *(x.float() for x in (q, k, v))).dtype == torch.float32


@pytest.mark.parametrize("spec", [spec for spec in cases.SPECS if cases.build(spec).takes_reals])
def test_a_scheme_that_takes_reals_is_the_same_at_whole_ones(spec):
    scheme, pos = cases.build(spec), torch.arange(-20, 21)
    whole, real = scheme.terms(pos).tables(), scheme.terms(pos.double()).tables()
    for name, table in whole.items():
        torch.testing.assert_close(real[name], table, **EXACT)
    q, k, _ = given(9, 9)
    at = torch.arange(9)[None]
    for a, b in zip(scheme.rotate(q, k, at, at), scheme.rotate(q, k, at.double(), at.double()), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    if scheme.embeds:
        torch.testing.assert_close(scheme.embed(at.double()), scheme.embed(at), **EXACT)
    if scheme.terms(pos).pair is not None:
        how = {"scale": 0.3, "visible": None}
        pair = scheme.terms(pos).pair
        torch.testing.assert_close(pair(q, k, at, at, **how), pair(q, k, at.double(), at.double(), **how), **EXACT)


def test_how_far_tables_and_rotations_differ():
    for size in (2, 3, 5):
        scheme = Grouped(Rope(head_dim=8), size=size)
        pos = torch.arange(60)
        by_positions = scheme.positions(pos)[None] - scheme.positions(pos)[:, None]
        by_offsets = scheme.offsets((pos[None] - pos[:, None]).flatten()).view(60, 60)
        assert (by_positions - by_offsets).abs().max() == 1
    for window, size, most in ((6, 3, 1), (8, 4, 1), (8, 5, 2), (7, 4, 2)):
        scheme = SelfExtend(Rope(head_dim=8), window=window, size=size)
        every = torch.arange(40)
        ours = scheme.offsets((every[None] - every[:, None]).flatten()).tolist()
        theirs = [oracles.self_extended(i, j, window, size) for i in range(40) for j in range(40)]
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) == most


def test_maps_in_a_row_apply_from_right_to_left():
    scheme = cases.build("learned:length=64@grouped:size=2@interpolated:factor=1.5")
    pos = torch.arange(60)
    table = scheme.state_dict()["scheme.scheme.table"]
    assert torch.equal(scheme.embed(pos), table[[math.floor(p / 1.5 / 2) for p in range(60)]])
    assert scheme.max_length == 192
    q, k, v = given()
    rope = cases.build("rope@grouped:size=2@selfextend:window=5,size=3")
    got = logits(rope, q, k, v)
    freqs = oracles.frequencies(cases.HEAD_DIM)
    for m, n in ((0, 0), (1, 7), (2, 6), (4, 5)):
        i, j = (x // 2 for x in oracles.self_extended_positions(Q_POS[m], K_POS[n], 5, 3))
        at = (oracles.rotated(x.numpy(), p, freqs) for x, p in ((q[0, 0, m], i), (k[0, 0, n], j)))
        assert float(got[0, 0, m, n]) == pytest.approx(0.3 * oracles.dot(*at), abs=1e-10)


# ---- laws and declarations -------------------------------------------------------------------------

MAPPED = [
    "rope@interpolated", "rope@grouped:size=3", "rope@recurrent", "rope@selfextend", "rope@selfextend:window=4,size=2",
    "rope:partial=0.5@selfextend:window=4,size=3", "rope:scaling=dynamic,factor=2,original=6@grouped:size=2",
    "rope:scaling=yarn,factor=4,original=16,theta=50@interpolated:factor=3", "rope@grouped:size=1",
    "xpos@interpolated", "xpos@grouped:size=2", "xpos@selfextend:window=3,size=2",
    "tisa@interpolated", "tisa@grouped", "tisa@recurrent", "tisa@selfextend", "tisa2:kernels=4@interpolated:factor=3",
    "alibi@interpolated", "alibi:slopes=learned@grouped:size=3", "kerple:kind=power@selfextend:window=5,size=3",
    "alibi:scaled=true,rounding=bfloat16@grouped:size=2", "sandwich:width=16@interpolated", "xl@grouped:size=2",
    "t5@interpolated", "t5:buckets=8,max_distance=12@selfextend:window=4,size=2", "toeplitz:clip=3@interpolated",
    "toeplitz:clip=3@recurrent:length=2", "shaw:clip=3@interpolated:factor=2.5", "shaw:clip=3,heads=own@selfextend",
    "huang1:clip=3@interpolated:factor=3.3", "huang3:clip=3@grouped:size=3", "huang4:clip=3@interpolated:factor=0.3",
    "deberta:buckets=4,max_distance=8@interpolated", "deberta:buckets=3,spacing=linear@grouped:size=2",
    "learned:length=16@interpolated", "learned:length=6@grouped:size=3", "learned:length=8@recurrent:length=8",
    "sinusoidal@interpolated", "sinusoidal@recurrent:length=5", "first@grouped:size=2", "first@interpolated:factor=2",
    "fire:width=6,length=4@interpolated", "fire@recurrent:length=6", "cope:positions=4@grouped:size=2", "nope@grouped",
    "fade@interpolated:factor=3", "pope@interpolated", "fope@grouped:size=2", "grape@interpolated:factor=2.5",
    "inkling:extent=6,width=2@grouped:size=2", "inkling:extent=5,width=2@interpolated:factor=2",
    "rope@grouped:size=2@selfextend:window=4,size=3", "toeplitz:clip=3@interpolated@grouped:size=2",
    "alibi@grouped:size=2+rope@interpolated+tisa", "rope@selfextend:window=4,size=2+tisa@grouped:size=2",
]  # fmt: skip


@pytest.mark.parametrize("spec", MAPPED)
def test_laws_hold(spec):
    check_scheme(locant.scheme(spec, **DIMS))


@pytest.mark.parametrize("spec", MAPPED)
def test_str_gives_the_string_back(spec):
    assert str(locant.scheme(spec, **DIMS)) == spec
    assert str(copy.deepcopy(locant.scheme(spec, **DIMS))) == spec


def test_laws_hold_for_a_users_map():
    for scheme in (Rope(head_dim=8), Tisa(n_heads=4), locant.scheme("toeplitz:clip=12", n_heads=4)):
        check_scheme(Logarithmic(scheme, base=1.5))
    assert str(Logarithmic(Tisa(kernels=2, n_heads=4), base=1.5)) == "tisa:kernels=2@logarithmic:base=1.5"
    assert Logarithmic(locant.scheme("toeplitz:clip=12", n_heads=4)).reach == 8 * 2**4
    assert Logarithmic(locant.scheme("learned:length=12", d_model=4)).max_length == 8 * 2**4


def test_what_a_subclass_changes_it_declares_again():
    class Shifted(Grouped):
        def positions(self, pos):
            return super().positions(pos) + 3

    scheme = Shifted(locant.scheme("toeplitz:clip=12", n_heads=4), size=2)
    assert not scheme.monotone
    assert not scheme.takes_reals
    assert scheme.reach is None

    class Rounded(Tisa):
        def terms(self, r):
            return super().terms(r.long())

    assert Tisa.takes_reals
    assert not Rounded.takes_reals
    rounded = Rounded(n_heads=4)  # at 3/2 it is interpolated between 1 and 2, not rounded
    halved = Interpolated(rounded, factor=2).terms(torch.tensor([3])).bias
    torch.testing.assert_close(halved, rounded.terms(torch.tensor([1, 2])).bias.mean(1, keepdim=True))


def test_a_subclass_with_other_offsets_declares_them_again():
    class Doubled(Grouped):
        def offsets(self, r):
            return 2 * super().offsets(r)

    scheme = Doubled(locant.scheme("toeplitz:clip=12", n_heads=4), size=2)
    assert not scheme.monotone
    assert scheme.reach is None


def test_the_length_of_a_map_that_is_not_monotone():
    """Positions 0 to 49 again and again, but for one."""

    class Jumping(Map):
        def positions(self, pos):
            return torch.where(pos == 100, 1000, pos % 50)

    assert Jumping(locant.scheme("learned:length=64", d_model=4)).max_length == 100


@pytest.mark.parametrize(
    "text",
    [
        "interpolated:factor=1.1",
        "interpolated:factor=3.3",
        "interpolated:factor=0.7",
        "grouped:size=3",
        "selfextend:window=5,size=3",
        "selfextend:window=40,size=7",
    ],
)
def test_the_formula_of_the_reach_is_what_a_search_finds(text):
    scheme = cases.build(f"tisa@{text}")
    for limit in (0, 1, 2, 5, 6, 30, 33, 64, 170, 1000, 77_777):  # 30 and 170 · 1.1 are rounded
        assert scheme.first_at(limit) == _first(scheme.offsets, limit)


def test_declarations():
    build = cases.build
    assert build("learned:length=512@interpolated:factor=4").max_length == 2048
    assert build("learned:length=512@grouped:size=4").max_length == 2048
    assert build("learned:length=512@recurrent:length=512").max_length is None
    assert build("learned:length=512@recurrent:length=600").max_length == 512
    assert build("toeplitz:clip=128@interpolated:factor=4").reach == 512
    assert build("toeplitz:clip=128@selfextend:window=64,size=4").reach == 64 + 64 * 4
    assert build("toeplitz:clip=128@recurrent:length=99").reach is None
    assert build("rope@interpolated").shift_invariant
    assert not build("rope@grouped").shift_invariant
    assert build("tisa@grouped").shift_invariant
    assert build("deberta:buckets=4,max_distance=8@grouped").scale(64) == build("deberta").scale(64)
    assert build("nope@grouped").silent
    assert build("t5@grouped").bucket_table is None
    assert build("tisa@grouped").components(torch.arange(3)) is None
    assert not build("tisa@grouped").can_start_from_curve
    assert build("tisa").can_start_from_curve
    assert build("tisa@grouped").parameter_count() == build("tisa").parameter_count()
    tisa = build("tisa@grouped")
    assert torch.equal(tisa.parameter_scale("scheme.offset"), tisa.scheme.parameter_scale("offset"))
    table = build("learned:length=8@interpolated:factor=2").position_table
    assert table.shape == (16, cases.D_MODEL)
    assert build("learned:length=8@recurrent:length=8").position_table is None


def test_a_state_without_the_map_loads():
    for text in ("grouped", "grouped:size=2@interpolated"):
        plain, mapped = cases.build("tisa"), cases.build(f"tisa@{text}")
        mapped.load_state_dict(plain.state_dict())
        inner = mapped.scheme.scheme if "@" in text else mapped.scheme
        assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), plain.parameters(), strict=True))
    whole = torch.nn.ModuleDict({"a": cases.build("tisa@grouped"), "b": torch.nn.Linear(2, 2)})
    state = {**{f"a.{name}": x for name, x in plain.state_dict().items()}, "b.weight": torch.ones(2, 2)}
    missing = whole.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["b.bias"], [])
    assert torch.equal(whole["a"].scheme.offset, plain.offset)
    with pytest.raises(RuntimeError, match="slope"):
        cases.build("tisa@grouped").load_state_dict({**plain.state_dict(), "slope": torch.ones(1)})


def test_tables_of_a_mapped_scheme_are_cached(monkeypatch):
    calls, original = [], Tisa.terms
    monkeypatch.setattr(Tisa, "terms", lambda self, r: calls.append(len(r)) or original(self, r))
    scheme = cases.build("tisa@grouped:size=3").float()
    q, k, v = cases.tensors(lq=60, lk=60, dtype=torch.float32)
    assert tables._parts(scheme) is not None
    with torch.no_grad():
        calls.clear()
        before = locant.attend(q, k, v, scheme, causal=True)
        locant.attend(q, k, v, scheme, causal=True)
        assert len(calls) == 1
        scheme.size = 2  # an option counts, and so does a parameter of the scheme inside
        after = locant.attend(q, k, v, scheme, causal=True)
        assert (after - before).abs().max() > 1e-4
        scheme.scheme.amplitude.data += 1
        assert (locant.attend(q, k, v, scheme, causal=True) - after).abs().max() > 1e-4


def test_gradients_reach_the_scheme():
    scheme = cases.build("toeplitz:clip=5@interpolated:factor=2").float()
    q, k, v = cases.tensors(lq=20, lk=20, dtype=torch.float32)
    locant.attend(q, k, v, scheme, causal=True).square().sum().backward()
    assert (scheme.scheme.table.grad.abs().sum(0) > 0)[:6].all()


class Warm(locant.Scheme):
    """A bias that decays, side vectors read from x, and a temperature by the position of the query."""

    reads_queries = causal_only = takes_reals = True
    read_width = 2

    def terms(self, r):
        return Terms(bias=-r.abs().double()[None], query_side=torch.stack([r.double(), r.double() ** 2], -1)[None])

    def read(self, x):
        return x[:, None, :, :2].expand(-1, 4, -1, -1)

    def sides(self, tokens):
        warmth = 1 + tokens.q_pos[:, None].double()
        return Sides(query=tokens.read_q, temperature=warmth.expand(-1, 4, -1))


def test_what_a_scheme_computes_for_each_token_keeps_true_positions():
    q, k, v = given(9, 9)
    x, scheme = torch.randn(2, 9, 6, dtype=torch.float64), Grouped(Warm(), size=3)
    assert scheme.reads_queries
    assert scheme.has_sides
    assert scheme.causal_only
    got = eager.logits(prepare(q, k, v, scheme, x=x, causal=True, scale=0.3))
    for i, j in ((0, 0), (8, 1), (7, 6), (5, 0)):
        r = -((i - j) // 3)
        side = x[:, None, i, 0] * r + x[:, None, i, 1] * r**2
        expected = (1 + i) * (0.3 * ((q[:, :, i] * k[:, :, j]).sum(-1) + side) + r)
        torch.testing.assert_close(got[:, :, i, j], expected, **EXACT)
    with pytest.raises(ValueError, match="is for causal attention"):
        prepare(q, k, v, scheme, x=x)
    with pytest.raises(ValueError, match="reads hidden states"):
        prepare(q, k, v, scheme, causal=True)


def test_a_map_of_a_scheme_in_half_precision():
    for spec in ("tisa@interpolated", "toeplitz:clip=3@interpolated", "huang4:clip=3@interpolated"):
        terms = cases.build(spec).bfloat16().terms(torch.arange(-5, 6))
        assert all(table.dtype in (torch.float32, torch.float64) for table in terms.tables().values())
    assert cases.build("learned:length=8@interpolated").bfloat16().embed(torch.arange(9)).dtype == torch.bfloat16


# ---- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rope@", r"'rope@' has an @ without a map after it; write SCHEME@MAP, such as rope@grouped"),
        ("@grouped", r"a scheme without a name"),
        ("rope@grouppd", r"unknown map 'grouppd' \(did you mean 'grouped'\?\); known maps: interpolated, grouped, "),
        ("grouped:size=4", r"grouped maps the positions of a scheme; write SCHEME@grouped"),
        ("rope@alibi", r"alibi is a scheme, and a map must follow @: interpolated, .*; join schemes by \+"),
        ("rope@grouped:sise=4", r"grouped has no option 'sise' \(did you mean 'size'\?\); its options: size"),
        ("rope@grouped:scheme=4", r"grouped has no option 'scheme'"),
        ("rope@grouped:size=0", r"grouped: size must be a whole number ≥ 1, got 0"),
        ("rope@grouped:size=2.5", r"grouped: size must be a whole number, got '2.5'"),
        ("rope@interpolated:factor=0", r"interpolated: factor must be a finite number > 1e-06, got 0"),
        ("rope@recurrent:length=0", r"recurrent: length must be a whole number ≥ 1, got 0"),
        ("rope@selfextend:window=3,size=4", r"with window = 3 < size = 4 a far key could share"),
        ("learned@selfextend", r"selfextend maps offsets, and learned adds a vector to each token; use interpolated"),
        ("fire@selfextend", r"selfextend maps offsets, and fire reads positions, not offsets; use"),
        ("rope:scaling=dynamic@selfextend", r"its rotations depend on the length of the whole text"),
        ("rope@selfextend@grouped", "has far rotations.*write @grouped before @selfextend"),
        ("xpos@recurrent", r"xpos needs positions in the order of the tokens, and recurrent is not monotone"),
        ("cope@recurrent", r"cope needs positions in the order of the tokens"),
        ("alibi:rounding=bfloat16@recurrent", r"needs positions in the order of the tokens"),
        ("rope@selfextend+rope", r"cannot be added to another scheme that rotates"),
        ("rope" + "@grouped" * 9, r"a scheme with 9 maps; at most 8 can follow each other"),
    ],
)
def test_wrong_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        locant.scheme(spec, **DIMS)


def test_other_refusals():
    with pytest.raises(TypeError, match="grouped maps the positions of a scheme, got str: 'rope'"):
        Grouped("rope", size=4)
    with pytest.raises(ValueError, match=r"not the sum rope\+tisa; map its parts: rope@grouped:…\+tisa@grouped:…"):
        Grouped(Sum(Rope(head_dim=8), Tisa(n_heads=4)), size=4)
    assert str(Grouped(Sum(Rope(head_dim=8)), size=4)) == "rope@grouped:size=4"
    with pytest.raises(ValueError, match=r"positions 0 … 2048 are mapped to 0 … 512, and learned:length=512 has 0 … 511"
                                         r"; use at most 2048 positions"):  # fmt: skip
        cases.build("learned:length=512@interpolated:factor=4").embed(torch.arange(2049))
    with pytest.raises(ValueError, match="positions -1 … 3 are mapped to -1"):
        cases.build("learned:length=512@grouped").embed(torch.arange(-1, 4))

    class Backwards(Map):
        def positions(self, pos):
            return -pos

    with pytest.raises(ValueError, match="backwards is not monotone; use another map, or declare monotone = True"):
        Backwards(locant.scheme("xpos", head_dim=8))
    assert Backwards(Rope(head_dim=8)).shift_invariant is False

    class Whole(Rope):
        def rotate(self, q, k, q_pos, k_pos):
            return super().rotate(q, k, q_pos, k_pos)

    q, k, v = given()
    with pytest.raises(TypeError, match="the map gives real positions, and whole takes whole ones; use grouped"):
        locant.attend(q, k, v, Interpolated(Whole(head_dim=8)))
    with pytest.raises(TypeError, match=r"positions must be integers, got torch\.float32"):
        cases.build("sinusoidal").embed(torch.arange(3.0))
    with pytest.raises(NotImplementedError, match="selfextend does not map positions"):
        SelfExtend(Rope(head_dim=8)).positions(torch.arange(3))


@pytest.mark.parametrize("spec", ["fox@grouped", "fox:two_sided=true@interpolated", "logn@recurrent:length=8"])
def test_schemes_that_go_by_the_order_of_tokens_have_no_map(spec):
    with pytest.raises(ValueError, match="goes by the order and the number of tokens"):
        locant.scheme(spec, n_heads=4, head_dim=8, d_model=32)


def test_a_users_map_in_a_spec(monkeypatch):
    monkeypatch.setitem(locant.schemes.MAPS, "logarithmic", Logarithmic)
    scheme = locant.scheme("tisa:kernels=2@logarithmic:base=3@grouped:size=2+rope@logarithmic", **DIMS)
    assert str(scheme) == "tisa:kernels=2@logarithmic:base=3@grouped:size=2+rope@logarithmic"
    check_scheme(scheme)
    assert isinstance(Recurrent(Rope(head_dim=8), length=3), Map)
