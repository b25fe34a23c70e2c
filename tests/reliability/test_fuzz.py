"""2,000 random calls, and whether the fuzzer sees errors that are put in on purpose."""

import re
from dataclasses import replace

import pytest
import torch

import locant
from locant.attention import fused, request, tables
from locant.attention.build import build
from locant.schemes import table
from locant.schemes.base import Scheme
from reliability.fuzz import Case, draw, run
from reliability.fuzz.__main__ import main, reproducer
from reliability.fuzz.campaign import Counts, Ran, run_block
from reliability.fuzz.check import COMPARED, FAILED, REFUSED
from reliability.fuzz.shrink import shrink
from reliability.fuzz.specs import MAPS, NEW, OPTIONS

SEED, BLOCK = 17, 250
needs_kernel = pytest.mark.skipif(
    build().library is None, reason=f"no kernel here: {build().why}; returns with a C compiler"
)


@pytest.mark.parametrize("first", range(0, 2000, BLOCK))
@needs_kernel
def test_2000_random_calls(first):
    failed = [ran for ran in run_block(SEED, first, BLOCK) if ran.outcome.kind == FAILED]
    assert not failed, f"{failed[0].outcome.what}; python -m reliability.fuzz --seed {SEED} --case {failed[0].index}"


def test_every_scheme_and_map_is_drawn():
    assert set(OPTIONS) == set(locant.SCHEMES)
    assert set(MAPS) == set(locant.schemes.MAPS)
    cases = [draw(SEED, index) for index in range(600)]
    assert {name for case in cases for name in case.scheme_names} == set(OPTIONS)
    assert {each[0] for case in cases for each in case.maps if each is not None} == set(MAPS)
    assert {case.states for case in cases if case.reads} == {"pair", "keys", "queries"}


def test_cases_of_the_new_schemes_alone():
    cases = [draw(SEED, index, new=True) for index in range(50)]
    assert all("@" in case.spec or set(case.scheme_names) & set(NEW) for case in cases)
    assert cases == [draw(SEED, index, new=True) for index in range(50)]


def test_a_case_depends_on_its_number_alone():
    cases = [draw(SEED, index) for index in range(30)]
    torch.randn(5)
    assert [draw(SEED, index) for index in reversed(range(30))] == cases[::-1]
    assert len(set(cases)) == 30


# ---- errors on purpose ---------------------------------------------------------------------------


def wrong_offsets(change):
    """All schemes get other offsets."""

    def inject(monkeypatch):
        monkeypatch.setattr(request, "tables", lambda scheme, offsets, dtype, decoding: scheme.terms(change(offsets.r)))

    return inject


def ignored_mask(monkeypatch):
    monkeypatch.setattr(request, "_mask", lambda mask, q, lk: None)


def wrong_scale(monkeypatch):
    right = Scheme.scale
    monkeypatch.setattr(Scheme, "scale", lambda self, head_dim: 1.001 * right(self, head_dim))


def no_gradient_of_tables(monkeypatch):
    monkeypatch.setattr(table, "wide", lambda x: x.detach().float())


def a_gradient_too_large(monkeypatch):
    """The kernel's gradient of the keys, by one part in ten thousand."""
    right = fused.backward

    def wrong(*arguments):
        grads = right(*arguments)
        grads[1] = grads[1] * 1.0001
        return grads

    monkeypatch.setattr(fused.OPERATORS, "backward", wrong)


def stale_tables(monkeypatch):
    """The cache compares the first number of a parameter only."""

    def same(number, copy):
        return number.shape == copy.shape and torch.equal(number.flatten()[:1], copy.flatten()[:1])

    monkeypatch.setattr(tables, "_equal", same)


def a_changed_input(monkeypatch):
    right = request._check_tensors
    monkeypatch.setattr(request, "_check_tensors", lambda q, k, v: [right(q, k, v), q.data.mul_(1.5)][0])


def an_accident(monkeypatch):
    def broken(*_):
        raise IndexError("index 3 is out of bounds")

    monkeypatch.setattr(request, "find_offsets", broken)


def first_failure(most, matters=lambda case: True):
    for index in range(most):
        case = draw(SEED, index)
        if not matters(case):
            continue
        outcome = run(case)
        if outcome.kind == FAILED:
            return Ran(index, case, outcome, 0.0)
    return None


FAULTS = {
    "sign of r": (wrong_offsets(lambda r: -r), 20),
    "r + 1": (wrong_offsets(lambda r: r + 1), 20),
    "mask ignored": (ignored_mask, 20),
    "scale": (wrong_scale, 20),
    "gradient of tables ignored": (no_gradient_of_tables, 60),
    "gradient too large": (a_gradient_too_large, 60),
    "stale tables": (stale_tables, 400),
    "input changed": (a_changed_input, 20),
    "accident": (an_accident, 20),
}
"""An error, and the number of cases within which it must be found."""


@needs_kernel
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_is_found(fault, monkeypatch):
    inject, within = FAULTS[fault]
    inject(monkeypatch)
    cached = fault == "stale tables"
    found = first_failure(within, lambda case: not cached or case.before == "rest")
    assert found is not None
    monkeypatch.undo()
    assert run(found.case).kind == COMPARED


@needs_kernel
def test_a_failure_shrinks_and_prints_two_lines_that_reproduce_it(monkeypatch, capsys):
    wrong_offsets(lambda r: -r)(monkeypatch)
    found = first_failure(20)
    assert main(["--seed", str(SEED), "--case", str(found.index)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert f"again: python -m reliability.fuzz --seed {SEED} --case {found.index}" in printed
    start = printed.index("from reliability.fuzz import Case, run")
    lines = "\n".join(printed[start : start + 2])

    exec(lines, {})
    assert "kind='failed'" in capsys.readouterr().out
    small = eval(re.search(r"run\((Case\(.*\))\)\)", lines)[1], {"Case": Case})
    assert reproducer(small) == lines
    assert small.lq * small.lk <= 4
    assert "+" not in small.spec
    monkeypatch.undo()
    exec(lines, {})
    assert "kind='compared'" in capsys.readouterr().out


def test_shrinking_keeps_what_the_failure_needs():
    """A failure that needs three features of a case with many."""

    def attempt(case):
        bad = case.causal and case.lq > 4 and "tisa" in case.spec
        return replace(run(Case()), kind=FAILED if bad else COMPARED, what="out is off by 1, allowed 0")

    case = replace(draw(SEED, 3), spec="alibi:slopes=fixed+tisa:kernels=3+t5", lq=60, lk=70, causal=True)
    small, _ = shrink(case, attempt(case), attempt)
    assert (small.spec, small.causal, small.lq, small.lk) == ("tisa", True, 5, 1)
    assert replace(small, spec="nope", lq=1, causal=False) == Case(impl=small.impl, data=case.data, d=1, dv=1)


def test_cases_that_the_fuzzer_once_misjudged():
    """An empty batch under a transform, or with positions that nobody can read, and rounding of a flat softcap."""
    judged = {
        Case(spec="deberta", impl="fused", b=0, d=1, dv=1, context="vjp"): "refused",
        Case(spec="deberta", impl="fused", b=0, d=1, dv=1, context="vmap"): "compared",
        Case(spec="fox", impl="sdpa", b=0, lk=6, d=1, dv=1, positions="clusters", pos_shape="expanded"): "compared",
        Case(spec="tisa2", impl="fused", lq=3, lk=23, d=12, dv=12, mask="B11K", mask_kind="sparse", softcap=0.3,
             wanted="p", data=201418867945888): "compared",
        # A weight of 1 in bfloat16, which the backward pass of the kernel computes again from rounded logits.
        Case(spec="shaw+inkling", impl="fused", groups=3, d=10, dv=10, dtype="bfloat16", wanted="p",
             data=137710138544758): "compared",
    }  # fmt: skip
    assert [run(case).kind for case in judged] == list(judged.values())


def test_only_an_expected_refusal_counts_as_one(monkeypatch):
    case = Case(spec="huang1:clip=3,heads=own", lq=3, lk=3, impl="sdpa")
    assert run(case).kind == REFUSED
    assert run(case).what == "gain in sdpa"

    def refuse(*_, **__):
        raise ValueError("no")

    monkeypatch.setattr(locant, "attend", refuse)
    assert run(case).kind == FAILED  # refused, in other words
    assert run(replace(case, impl="eager")).kind == FAILED


@needs_kernel
def test_a_call_that_should_be_refused_and_is_not_fails(monkeypatch):
    monkeypatch.setattr(locant.attention.choice, "NO_WEIGHTS", None)
    outcome = run(Case(spec="tisa:kernels=3", lq=3, lk=3, impl="sdpa", need_weights=True))
    assert outcome.kind == FAILED


@needs_kernel
def test_the_table_counts_every_case(tmp_path, capsys):
    path = tmp_path / "fuzz.csv"
    assert main(["--cases", "30", "--seed", "5", "--first", "100", "--output", str(path)]) == 0
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert rows[0] == ["by", "name", "cases", "compared", "refused", "failed", "seconds"]
    assert rows[1][:3] == ["all", "all", "30"]
    assert sum(int(row[2]) for row in rows if row[0] == "back end") == 30
    assert sum(int(row[4]) for row in rows if row[0] == "refused") == int(rows[1][4])
    assert "30 of 30 cases, 0 failed" in capsys.readouterr().out
    counts = Counts()
    for ran in run_block(5, 100, 30):
        counts.add(ran)
    assert [row["cases"] for row in counts.table()] == [int(row[2]) for row in rows[1:]]
