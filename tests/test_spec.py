"""Spec strings."""

import pytest

import locant
from locant.schemes import Huang4, Learned, Rope, Sum, Tisa

DIMS = {"n_heads": 12, "head_dim": 64, "d_model": 768}


@pytest.mark.parametrize(
    "spec",
    [
        "tisa",
        "tisa:kernels=5",
        "tisa:kernels=5+learned:length=512",
        "huang4:clip=64,heads=own",
        "rope:theta=500000",
        "rope:theta=10000.5,scaling=yarn,factor=4,original=4096",
        "rope:partial=0.25",
        "shaw:values=false",
        "alibi+rope+tisa:kernels=3",
    ],
)
def test_str_gives_the_string_back(spec):
    assert str(locant.scheme(spec, **DIMS)) == spec


def test_options_reach_the_scheme():
    scheme = locant.scheme("tisa:kernels=5+learned:length=512", **DIMS)
    assert isinstance(scheme, Sum)
    tisa, learned = scheme.parts
    assert isinstance(tisa, Tisa)
    assert isinstance(learned, Learned)
    assert (tisa.kernels, tisa.n_heads, learned.length, learned.d_model) == (5, 12, 512, 768)
    assert str(Huang4(clip=3, n_heads=2, head_dim=4)) == "huang4:clip=3"


def test_exponents_are_not_sums():
    scheme = locant.scheme("rope:theta=1e+5", **DIMS)
    assert isinstance(scheme, Rope)
    assert scheme.theta == 1e5
    assert str(locant.scheme("rope:theta=1e+5+tisa", **DIMS)) == "rope:theta=100000+tisa"
    assert str(locant.scheme(str(locant.scheme("rope:theta=1e+20", **DIMS)), **DIMS)) == "rope:theta=1e+20"


def test_spaces_and_capitals_do_not_matter():
    assert str(locant.scheme(" TISA : kernels = 3 + Alibi ", **DIMS)) == "tisa:kernels=3+alibi"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hunag4", r"unknown scheme 'hunag4' \(did you mean 'huang4'\?\); known schemes: nope, learned, .*deberta"),
        ("zzz", r"unknown scheme 'zzz'; known schemes: nope"),
        ("tisa:kernel=5", r"tisa has no option 'kernel' \(did you mean 'kernels'\?\); its options: kernels"),
        ("nope:slope=1", r"nope has no option 'slope'; its options: none"),
        ("tisa:n_heads=3", r"tisa has no option 'n_heads'"),
        ("tisa:kernels=many", r"tisa: kernels must be a whole number, got 'many'"),
        ("tisa:kernels=2.5", r"tisa: kernels must be a whole number, got '2.5'"),
        ("rope:theta=big", r"rope: theta must be a number, got 'big'"),
        ("shaw:values=maybe", r"shaw: values must be true or false, got 'maybe'"),
        ("tisa:kernels", r"tisa: write options as name=value, got 'kernels'"),
        ("tisa:kernels=", r"tisa: write options as name=value, got 'kernels='"),
        ("tisa:kernels=1,kernels=2", r"tisa: option 'kernels' is given twice"),
        ("tisa+", r"a scheme without a name: write NAME:option=value"),
        ("nope:x=1", r"nope has no option 'x'; its options: none"),
        ("rope:partial=0.01", r"leaves nothing to rotate"),
        ("", r"the spec is empty; write 'nope'"),
        ("rope/nope", r"names a scheme per layer; use locant.per_layer"),
        ("tisa:kernels=-1", r"tisa: kernels must be a whole number ≥ 0, got -1"),
        ("huang4:clip=0", r"huang4: clip must be a whole number ≥ 1, got 0"),
        ("huang1:clip=0", r"huang1: clip must be a whole number ≥ 1, got 0"),
        ("shaw:clip=-3", r"shaw: clip must be a whole number ≥ 1, got -3"),
        ("shaw:heads=some", r"shaw: heads must be one of 'shared', 'own', got 'some'"),
        ("learned:length=0", r"learned: length must be a whole number ≥ 1, got 0"),
        ("rope:scaling=yarm", r"rope: scaling must be one of 'none', 'linear', .*, got 'yarm'"),
        ("rope:factor=4", r"rope: factor=4 does nothing without scaling"),
        ("rope:partial=1.5", r"rope: partial is a share of the head"),
        ("rope:partial=0.02", r"rope: head_dim · partial"),
        ("rope:theta=nan", r"rope: theta must be a finite number > 0, got nan"),
        ("rope:theta=inf", r"rope: theta must be a finite number > 0, got inf"),
        ("kerple:kind=cubic", r"kerple: kind must be one of 'log', 'power', got 'cubic'"),
        ("t5:buckets=7", r"t5: buckets must be even, half of them for r > 0; got 7"),
        ("t5:max_distance=4", r"t5: max_distance must be a whole number ≥ 9, got 4"),
        ("tisa2:free=13", r"tisa2: free must be at most n_heads = 12, got 13"),
    ],
)
def test_errors_say_what_was_got_and_what_exists(spec, message):
    with pytest.raises(ValueError, match=message):
        locant.scheme(spec, **DIMS)


def test_a_missing_dimension_is_named():
    with pytest.raises(ValueError, match=r"learned needs d_model; pass d_model=… to locant.scheme"):
        locant.scheme("learned", n_heads=2)
    assert str(locant.scheme("alibi", n_heads=2)) == "alibi"  # it needs nothing else


def test_a_scheme_of_ones_own_by_name(monkeypatch):
    class Mine(locant.Scheme):
        pass

    monkeypatch.setitem(locant.SCHEMES, "mine", Mine)
    assert str(locant.scheme("mine+alibi", n_heads=2)) == "mine+alibi"


def test_a_class_under_another_name_is_refused(monkeypatch):
    """str() would name the class, and build the wrong scheme."""
    monkeypatch.setitem(locant.SCHEMES, "myrope", Rope)
    with pytest.raises(ValueError, match="registered as 'myrope', but its spec would read 'rope'"):
        locant.scheme("myrope", **DIMS)


def test_options_that_may_be_none(monkeypatch):
    class Mine(locant.Scheme):
        def __init__(self, *, window: int | None = None):
            super().__init__()
            self.window = window

    monkeypatch.setitem(locant.SCHEMES, "mine", Mine)
    assert locant.scheme("mine:window=5").window == 5
    assert locant.scheme("mine:window=none").window is None


def test_reach_is_said_by_the_class_that_defines_the_terms():
    class Mine(locant.Scheme):
        def __init__(self):
            super().__init__()
            self.reach = 5

    with pytest.raises(AttributeError, match=r"Mine\.reach cannot be set.*another name"):
        Mine()

    class Steeper(locant.SCHEMES["t5"]):
        def terms(self, r):
            return locant.Terms(bias=super().terms(r).bias - 0.1 * r.abs())

    assert locant.scheme("t5", **DIMS).reach == 128
    assert Steeper(n_heads=4).reach is None
    changed = locant.scheme("huang4:clip=8", **DIMS)
    changed.clip = 4
    assert changed.reach == 4
    assert locant.scheme("rope+huang4:clip=8+t5", **DIMS).reach == 128
    assert locant.scheme("tisa+huang4:clip=8", **DIMS).reach is None
    assert locant.scheme("rope+learned:length=9", **DIMS).reach == 0


def test_per_layer():
    layers = locant.per_layer("rope/rope/rope/nope", 8, **DIMS)
    assert [str(layer) for layer in layers] == ["rope", "rope", "rope", "nope"] * 2
    assert len({id(layer) for layer in layers}) == 8
    assert [str(layer) for layer in locant.per_layer(["tisa", "alibi"], 2, **DIMS)] == ["tisa", "alibi"]
    shared = locant.scheme("tisa", **DIMS)
    assert all(layer is shared for layer in locant.per_layer(shared, 3))
    with pytest.raises(ValueError, match="one per layer: got 2 for 3 layers"):
        locant.per_layer(["tisa", "alibi"], 3, **DIMS)


def test_parts_of_a_sum_must_fit_one_model():
    with pytest.raises(ValueError, match="n_heads differs"):
        Sum(Tisa(n_heads=2), Tisa(n_heads=3))
    with pytest.raises(TypeError, match="Sum needs one scheme or more"):
        Sum("tisa")


def test_layers_share_a_scheme_by_its_string():
    dims = {"n_heads": 4, "head_dim": 8, "d_model": 32}
    first, second, third, fourth = locant.per_layer("t5:shared=layers/t5", 4, **dims)
    assert first is third
    assert second is not fourth
    assert second is not first
    assert str(first) == "t5"
    whole = locant.per_layer("t5:buckets=16,shared=layers+first", 3, **dims)
    assert len(set(whole)) == 1
    assert str(whole[0]) == "t5:buckets=16+first"
    assert len(set(locant.per_layer("t5:shared=layers+rope", 2, **dims))) == 1  # rope has no parameters


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("t5:shared=layers+tisa", "tisa has parameters in attention"),
        ("rope@grouped:shared=layers", "belongs to the scheme"),
        ("t5:shared=heads", "no option 'shared'"),
    ],
)
def test_what_layers_cannot_share(spec, message):
    with pytest.raises(ValueError, match=message):
        locant.per_layer(spec, 2, n_heads=4, head_dim=8, d_model=32)


def test_one_scheme_has_no_layers_to_share_it():
    with pytest.raises(ValueError, match="per_layer"):
        locant.scheme("t5:shared=layers", n_heads=4)
