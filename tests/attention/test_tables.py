"""Tables are cached from call to call, and never used after anything they depend on has changed."""

import copy

import pytest
import torch
from torch import nn

import locant
from locant.attention import sdpa, tables
from tests import cases

SPECS = [
    "tisa",
    "t5",
    "alibi",
    "kerple",
    "sandwich:width=16",
    "huang4:clip=3",
    "xl",
    "shaw:clip=3",
    "tisa+learned:length=64",
]


def step(scheme, q, k, v, n, impl="auto", **how):
    with torch.no_grad():
        return locant.attend(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], scheme, causal=True, impl=impl, **how)


def whole(scheme, q, k, v, n, impl="auto", **how):
    with torch.no_grad():
        return locant.attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], scheme, impl=impl, **how)


def truth(scheme, q, k, v, n, **how):
    return step(copy.deepcopy(scheme), q, k, v, n, impl="eager", **how)  # a copy has no cached tables


def test_a_decoding_step_computes_no_table_over_the_whole_range(monkeypatch):
    columns, original = [], locant.SCHEMES["tisa"].terms
    monkeypatch.setattr(locant.SCHEMES["tisa"], "terms", lambda self, r: columns.append(len(r)) or original(self, r))
    scheme = cases.build("tisa").float()
    q, k, v = cases.tensors(lq=200, lk=200, dtype=torch.float32)
    ours = [step(scheme, q, k, v, n) for n in range(100, 200)]
    assert sum(columns) < 3 * 200  # once over twice the range, not 100 times over all of it
    for n, out in zip(range(100, 200), ours, strict=True):
        torch.testing.assert_close(out, truth(scheme, q, k, v, n), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["tisa:kernels=3", "t5:buckets=8,max_distance=12", "huang4:clip=3", "kerple"])
def test_any_changed_number_makes_new_tables(spec):
    """Each parameter is changed in its last element alone."""
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(lq=30, lk=30, dtype=torch.float32)
    for parameter in scheme.parameters():
        before = whole(scheme, q, k, v, 30)
        parameter.data.view(-1)[-1] += 3.0
        after = whole(scheme, q, k, v, 30)
        assert (after - before).abs().max() > 1e-4
        torch.testing.assert_close(after, whole(copy.deepcopy(scheme), q, k, v, 30, impl="eager"), rtol=1e-4, atol=1e-5)


def test_tables_are_computed_once_for_sequences_up_to_a_length(monkeypatch):
    columns, original = [], locant.SCHEMES["tisa"].terms
    monkeypatch.setattr(locant.SCHEMES["tisa"], "terms", lambda self, r: columns.append(len(r)) or original(self, r))
    scheme = cases.build("tisa").float()
    q, k, v = cases.tensors(lq=90, lk=90, dtype=torch.float32)
    for n in (80, 40, 80, 3, 90, 90):
        whole(scheme, q, k, v, n)
    assert columns == [159, 179]


@pytest.mark.parametrize("impl", ["eager", "sdpa", "auto"])
@pytest.mark.parametrize("spec", [*(spec for spec in SPECS if "shaw" not in spec), "fire", "rope+alibi"])
def test_whole_sequences_and_steps_in_any_order_equal_eager(spec, impl):
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(lq=60, lk=60, dtype=torch.float32)
    for n, run in ((50, whole), (20, whole), (30, step), (60, whole), (45, step), (1, whole), (60, step), (37, whole)):
        expected = run(copy.deepcopy(scheme), q, k, v, n, impl="eager")
        torch.testing.assert_close(run(scheme, q, k, v, n, impl=impl), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_steps_equal_eager(spec):
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(lq=60, lk=60, dtype=torch.float32)
    for n in (*range(2, 40), 5, 60, 1):
        torch.testing.assert_close(step(scheme, q, k, v, n), truth(scheme, q, k, v, n), rtol=1e-4, atol=1e-5)
        if n > 4:  # at other positions
            how = {"q_pos": torch.tensor([n + 99]), "k_pos": torch.arange(n) + 100}
            torch.testing.assert_close(
                step(scheme, q, k, v, n, **how), truth(scheme, q, k, v, n, **how), rtol=1e-4, atol=1e-5
            )


def _data(scheme):
    scheme.shape.data.mul_(2) if hasattr(scheme, "shape") else next(scheme.parameters()).data.mul_(2)


def _optimizer(scheme):
    optimizer = torch.optim.SGD(scheme.parameters(), lr=1.0)
    for parameter in scheme.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _load(scheme):
    scheme.load_state_dict({name: x + 1 for name, x in scheme.state_dict().items()})


def _replace(scheme):
    name, parameter = next(scheme.named_parameters())
    setattr(scheme, name, nn.Parameter(parameter.detach() + 1))


def _numpy(scheme):
    next(scheme.parameters()).detach().numpy()[:] += 1


def _round(scheme):
    scheme.bfloat16()


@pytest.mark.parametrize("change", [_data, _optimizer, _load, _replace, _numpy, _round])
@pytest.mark.parametrize("spec", ["tisa", "t5", "huang4:clip=3"])
@pytest.mark.parametrize("run", [step, whole])
def test_a_changed_parameter_changes_the_tables(spec, change, run):
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(lq=40, lk=40, dtype=torch.float32)
    before = run(scheme, q, k, v, 30)
    change(scheme)
    after = run(scheme, q, k, v, 30)
    expected = run(copy.deepcopy(scheme), q, k, v, 30, impl="eager")
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(before, after)


def test_functional_parameters_change_the_tables():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = cases.build("tisa").float()

        def forward(self, q, k, v):
            return locant.attend(q, k, v, self.scheme, causal=True)

    model, (q, k, v) = Model(), cases.tensors(lq=1, lk=30, dtype=torch.float32)
    with torch.no_grad():
        before = model(q, k, v)
        other = {name: x + 1 for name, x in model.named_parameters()}
        after = torch.func.functional_call(model, other, (q, k, v))
        assert not torch.equal(before, after)
        torch.testing.assert_close(model(q, k, v), before)


def test_a_changed_option_changes_the_tables():
    scheme = cases.build("t5:buckets=8,max_distance=8").float()
    q, k, v = cases.tensors(lq=40, lk=40, dtype=torch.float32)
    step(scheme, q, k, v, 30)
    scheme.max_distance = 64
    torch.testing.assert_close(step(scheme, q, k, v, 30), truth(scheme, q, k, v, 30), rtol=1e-4, atol=1e-5)


def test_a_changed_part_changes_the_tables():
    scheme = cases.build("nope+huang4:clip=8").float()
    q, k, v = cases.tensors(lq=40, lk=40, dtype=torch.float32)
    step(scheme, q, k, v, 30)
    other = cases.build("huang3:clip=8").float()  # the same numbers in another scheme
    other.load_state_dict(scheme.parts[1].state_dict())
    scheme.parts[1] = other
    torch.testing.assert_close(step(scheme, q, k, v, 30), truth(scheme, q, k, v, 30), rtol=1e-4, atol=1e-5)
    scheme.parts[1] = cases.build("tisa").float()  # without a reach
    torch.testing.assert_close(step(scheme, q, k, v, 30), truth(scheme, q, k, v, 30), rtol=1e-4, atol=1e-5)


def test_transforms_do_not_write_to_the_cache():
    scheme = cases.build("huang4:clip=8").float()
    q, k, v = cases.tensors(lq=1, lk=30, dtype=torch.float32)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = scheme

        def forward(self):
            return locant.attend(q, k, v, self.scheme)

    with torch.no_grad():
        tables = torch.randn(3, *scheme.table.shape)
        each = torch.func.vmap(lambda x: torch.func.functional_call(Model(), {"scheme.table": x}, ()))(tables)
        torch.testing.assert_close(each[1], torch.func.functional_call(Model(), {"scheme.table": tables[1]}, ()))
        locant.attend(q, k, v, scheme)
        for _ in range(2):
            _, tangent = torch.func.jvp(
                lambda x: torch.func.functional_call(Model(), {"scheme.table": x}, ()),
                (scheme.table.detach(),),
                (torch.ones_like(scheme.table),),
            )
            assert tangent.abs().max() > 0


def test_a_changed_attribute_of_a_user_s_scheme_changes_the_tables():
    class Window(locant.Scheme):
        def __init__(self):
            super().__init__()
            self.size, self.slopes = 5, torch.ones(1)

        def terms(self, r):
            return locant.Terms(bias=-(r.abs() > self.size).float()[None] * self.slopes)

    scheme, (q, k, v) = Window(), cases.tensors(lq=40, lk=40, dtype=torch.float32)
    before = step(scheme, q, k, v, 30)
    scheme.slopes *= 3  # a tensor that is not a buffer: the tables of such a scheme are not cached
    between = step(scheme, q, k, v, 30)
    scheme.size = 9
    after = step(scheme, q, k, v, 30)
    assert not torch.equal(before, between)
    assert not torch.equal(between, after)
    torch.testing.assert_close(after, truth(scheme, q, k, v, 30))


def test_training_after_decoding_has_gradients():
    scheme = cases.build("tisa").float()
    q, k, v = cases.tensors(lq=1, lk=30, dtype=torch.float32)
    with torch.inference_mode():
        locant.attend(q, k, v, scheme, causal=True)
    step(scheme, *cases.tensors(lq=40, lk=40, dtype=torch.float32), 30)
    q.requires_grad_()
    out = locant.attend(q, k, v, scheme, causal=True)
    grads = torch.autograd.grad(out.square().sum(), [q, *scheme.parameters()])
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_a_bias_is_a_view_in_torch_s_kernel(monkeypatch):
    seen = []
    original = sdpa._kernel
    monkeypatch.setattr(sdpa, "_kernel", lambda *a, **kw: seen.append(a[4]) or original(*a, **kw))
    scheme, (q, k, v) = cases.build("alibi").float(), cases.tensors(lq=40, lk=40, dtype=torch.float32)
    step(scheme, q, k, v, 30, impl="sdpa")
    step(scheme, q, k, v, 31, impl="sdpa")
    assert seen[0].untyped_storage().data_ptr() == seen[1].untyped_storage().data_ptr()  # one table, two views


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lq", [1, 9])
@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((1, 40), torch.float32, ValueError, "bias must have a column for each of the"),
        ((1, 3), torch.float32, ValueError, "bias must have a column for each of the"),
        ((40,), torch.float32, ValueError, "bias must have a column for each of the"),
        ((1, None), torch.bfloat16, TypeError, "bias is torch.bfloat16 but must be float32 or wider"),
        ((1, None), torch.int64, TypeError, "bias is torch.int64 but must be float32 or wider"),
    ],
)
def test_wrong_tables_are_refused_whether_they_would_be_cached_or_not(shape, dtype, error, message, lq, grad):
    """A slice of a table with too many columns would look right."""

    class Wrong(locant.Scheme):
        cacheable = True

        def terms(self, r):
            return locant.Terms(bias=torch.zeros([len(r) if size is None else size for size in shape], dtype=dtype))

    tensors = cases.tensors(lq=lq, dtype=torch.float32)
    with torch.set_grad_enabled(grad), pytest.raises(error, match=message):
        locant.attend(*tensors, Wrong())


def test_terms_that_are_none_are_refused_without_gradients():
    class Nothing(locant.Scheme):
        cacheable = True

        def terms(self, r):
            return None

    with torch.no_grad(), pytest.raises(TypeError, match="terms must return Terms, got NoneType"):
        locant.attend(*cases.tensors(), Nothing())


OPTIONS = {"kerple": ("kind", "power"), "t5": ("max_distance", 20), "sandwich": ("theta", 50.0)}


@pytest.mark.parametrize("run", [step, whole])
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("what", ["number", "option"])
def test_a_change_in_any_part_of_a_sum_changes_the_tables(what, part, run):
    """The state of every part counts, not that of the first or the last one alone."""
    spec = "kerple+t5+tisa" if what == "number" else "kerple+t5+sandwich:width=16"
    scheme = cases.build(spec).float().requires_grad_(False)
    tensors = cases.tensors(lq=30, lk=30, dtype=torch.float32)
    before = run(scheme, *tensors, 30)
    changed = scheme.parts[part]
    if what == "number":
        next(changed.parameters()).view(-1)[1] += 3.0
    else:
        setattr(changed, *OPTIONS[changed.name()])
    after = run(scheme, *tensors, 30)
    torch.testing.assert_close(after, run(copy.deepcopy(scheme), *tensors, 30))
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("run", [step, whole])
@pytest.mark.parametrize("limit", ["CACHEABLE", "COMPARABLE"])
@pytest.mark.parametrize("spec", SPECS)
def test_tables_that_are_too_large_for_the_cache(spec, limit, run, monkeypatch):
    """They are computed for each call, with the same result."""
    scheme, tensors = cases.build(spec), cases.tensors(lq=30, lk=30)
    expected = [run(scheme, *tensors, n, impl="eager") for n in (30, 20)]
    monkeypatch.setattr(tables, limit, 10)
    fresh = copy.deepcopy(scheme)
    for n, right in zip((30, 20, 30), (*expected, expected[0]), strict=True):
        torch.testing.assert_close(run(fresh, *tensors, n, impl="eager"), right)
    numbers = sum(x.numel() for x in fresh.parameters())
    assert (fresh in tables._cache) == (limit == "COMPARABLE" and numbers <= 10)


class Mirrored(locant.schemes.Tisa):
    """The same `terms`, another part of them."""

    cacheable = True

    def bumps(self, r):
        return super().bumps(-r)


def test_another_class_with_the_same_terms_changes_the_tables():
    q, k, v = cases.tensors()
    scheme = cases.build("tisa")
    with torch.no_grad():
        before = locant.attend(q, k, v, scheme, impl="eager")
        scheme.__class__ = Mirrored
        after = locant.attend(q, k, v, scheme, impl="eager")
        fresh = locant.attend(q, k, v, copy.deepcopy(scheme), impl="eager")
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh)


@pytest.mark.parametrize("run", [step, whole])
def test_a_wider_call_after_a_narrow_one_has_tables_of_its_own(run):
    """The bias of this scheme is computed in float64, and float32 would round it."""
    scheme, tensors = cases.build("sandwich:width=16"), cases.tensors(lq=30, lk=30)
    expected = run(copy.deepcopy(scheme), *tensors, 30)
    run(scheme, *(x.float() for x in tensors), 30)
    assert torch.equal(run(scheme, *tensors, 30), expected)


@pytest.mark.parametrize("run", [step, whole])
def test_a_scheme_that_has_moved_to_another_device_is_not_served_from_the_cache(run):
    scheme, tensors = cases.build("tisa").float(), cases.tensors(lq=30, lk=30, dtype=torch.float32)
    run(scheme, *tensors, 30)
    scheme.to("meta")
    with pytest.raises(RuntimeError, match="device"):
        run(scheme, *tensors, 30)
