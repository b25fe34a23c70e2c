"""Sliding windows: only keys at −left ≤ k_pos − q_pos ≤ right are visible."""

import pytest
import torch

import locant
from locant.attention import choice, fused
from locant.attention.build import build
from locant.attention.request import prepare
from tests import cases
from tests.attention.test_fused import check

needs_kernel = pytest.mark.skipif(build().library is None, reason="no kernel here; returns with a C compiler")
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [4, 4, 0, 9, -3, 12, 5, 6, 70]])


def by_window(left, right, causal):
    """Visible pairs, one at a time, for queries and keys at POSITIONS."""
    visible = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    for b in range(2):
        for i in range(9):
            for j in range(9):
                distance = int(POSITIONS[b, j]) - int(POSITIONS[b, i])
                past, future = max(-distance, 0), max(distance, 0)
                near = (left is None or past <= left) and (right is None or future <= right)
                visible[b, 0, i, j] = near and not (causal and future)
    return visible


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(2, 1), (0, 0), (None, 3), (4, None), 2, None])
@pytest.mark.parametrize("spec", ["nope", "tisa", "rope", "shaw:clip=3", "cope:positions=4"])
def test_eager_equals_the_loops(spec, window, causal):
    scheme, (q, k, v) = cases.build(spec), cases.tensors(kv=2)
    mask = torch.rand(2, 1, 1, 9) < 0.8
    left, right = window if isinstance(window, tuple) else (window, window)
    visible = by_window(left, right, causal) & mask
    out, weights = locant.attend(q, k, v, scheme, q_pos=POSITIONS, k_pos=POSITIONS, mask=mask, window=window,
                                 causal=causal, impl="eager", need_weights=True)  # fmt: skip
    expected, expected_weights = cases.by_oracle(scheme, q, k, v, POSITIONS, POSITIONS, mask=visible)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert (weights.masked_select(~visible) == 0).all()


@pytest.mark.parametrize("how", [{"window": (20, 3)}, {"window": 130, "causal": True}, {"window": (0, None)}])
@pytest.mark.parametrize(
    ("spec", "impl"),
    [
        ("tisa", "sdpa"),
        *(pytest.param(x, "fused", marks=needs_kernel) for x in ("tisa", "huang4:clip=9", "shaw:clip=9")),
    ],
)
def test_forward_and_backward_equal_eager(spec, impl, how):
    """Over several tiles of the kernel; `check` compares with eager in float64."""
    scheme = cases.build(spec, n_heads=2).float()
    check(scheme, list(cases.tensors(b=1, h=2, kv=1, lq=280, lk=300, dtype=torch.float32)), impl=impl, **how)


@needs_kernel
def test_scattered_positions_in_the_kernel():
    scheme = cases.build("tisa", n_heads=2).float()
    pos = torch.randint(0, 60, (2, 150))
    check(
        scheme, list(cases.tensors(h=2, kv=1, lq=150, lk=150, dtype=torch.float32)), q_pos=pos, k_pos=pos, window=(7, 2)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex(monkeypatch):
    from locant.attention import flex

    monkeypatch.setattr(flex, "_run_compiled", flex._run)
    scheme, (q, k, v) = cases.build("tisa").float(), cases.tensors(lq=40, lk=40, dtype=torch.float32)
    with torch.no_grad():
        out = locant.attend(q, k, v, scheme, window=(5, 2), impl="flex")
        torch.testing.assert_close(out, locant.attend(q, k, v, scheme, window=(5, 2), impl="eager"))


@needs_kernel
def test_the_kernel_does_not_read_tiles_outside():
    """Queries at the end of 1,000 tokens: NaN in keys that no window reaches changes nothing."""
    q, k, v = cases.tensors(b=1, lq=40, lk=1000, dtype=torch.float32)
    out = locant.attend(q, k, v, window=(60, 0), impl="fused")
    k[:, :, :768], v[:, :, :768] = torch.nan, torch.nan
    assert torch.equal(locant.attend(q, k, v, window=(60, 0), impl="fused"), out)
    assert not torch.equal(locant.attend(q, k, v, window=(300, 0), impl="fused"), out)


def test_decoding_equals_the_whole_pass():
    scheme, (q, k, v) = cases.build("tisa"), cases.tensors(lq=12, lk=12)
    whole = locant.attend(q, k, v, scheme, causal=True, window=(3, 0))
    for t in range(12):
        step = locant.attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], scheme, causal=True, window=(3, 0))
        torch.testing.assert_close(step[:, :, 0], whole[:, :, t])


@pytest.mark.parametrize("window", [-1, True, 1.5, (1,), (1, 2, 3), (-1, 0), (1.0, 0), "3", (True, 1)])
def test_wrong_windows(window):
    with pytest.raises(ValueError, match="window must be a whole number ≥ 0"):
        locant.attend(*cases.tensors(), window=window)


def test_a_window_of_any_size():
    scheme, given = cases.build("tisa"), cases.tensors(lq=5, lk=5)
    for impl in ("eager", "auto"):
        whole = locant.attend(*given, scheme, impl=impl)
        for window in (2**62, 10**20, (10**20, 4)):
            torch.testing.assert_close(locant.attend(*given, scheme, window=window, impl=impl), whole)


@needs_kernel
def test_auto_takes_the_kernel():
    given = cases.tensors(dtype=torch.float32)
    assert choice.choose(prepare(*given, None), "auto").name == "sdpa"
    assert choice.choose(prepare(*given, None, window=2), "auto").name == "fused"
    assert fused.make_call(prepare(*given, None, window=(3, 4), causal=True))[-3:-1] == (-3, 0)
