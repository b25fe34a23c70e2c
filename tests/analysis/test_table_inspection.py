"""`locant inspect` of position tables without a model."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from locant.analysis import invariance, table_inspection
from locant.analysis.table_inspection import inspect_tables
from locant.analysis.verdict import verdict
from locant.hf.bare_tables import BareTable, bare_tables
from locant.report.inspection import inspection_page
from tests import hf_models
from tests.command_line import locant_command


def random(rows=64, width=32):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def sinusoidal(rows, width):
    angles = torch.arange(rows).double()[:, None] * 100.0 ** -torch.linspace(0, 1, width // 2).double()
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def r2(found):
    return {row.quantity: row for row in found.invariances if row.layer is None}


def inspected(table, **rest):
    return inspect_tables([BareTable("wpe", table, 0)], "made", **rest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_sinusoidal_table_is_toeplitz(dtype):
    found = inspected(sinusoidal(64, 32).to(dtype))
    assert r2(found)["E Eᵀ"].r2 == pytest.approx(1, abs=1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6)
    assert r2(found)["E Eᵀ, i ≠ j"].r2 > 0.99
    assert r2(found)["E Eᵀ"].control.mean < 0.5
    assert found.facts["dtype"] == str(dtype).removeprefix("torch.")


def test_a_random_table_is_near_its_control():
    rows = r2(inspected(random()))
    for row in rows.values():
        assert row.r2 == pytest.approx(row.control.mean, abs=0.06)
    assert rows["E Eᵀ, i ≠ j"].r2 < 0.1


def test_the_page_has_the_sections_that_follow_from_a_table():
    made = inspection_page(inspected(sinusoidal(64, 32)))
    assert [section.title for section in made.sections] == ["Translation invariance"]
    assert [figure.title for figure in made.sections[0].figures] == [
        "Position table, E Eᵀ", "Translation invariance", "Dimensions of the position table", "Principal components",
    ]  # fmt: skip
    assert made.subtitle == "How does this table tell positions apart?"
    assert "Toeplitz R² of 1.00" in made.verdict[0]
    assert "sine/cosine pairs" in made.verdict[1]


@pytest.mark.parametrize(("kind", "first"), [("bert", 0), ("roberta", 2), ("mpnet", 2), ("gpt2", 0), ("albert", 0)])
def test_the_same_numbers_as_with_the_model(tmp_path, kind, first):
    """From weights alone, with heads, as `of_model` has them from the model."""
    model = hf_models.make(kind)
    table = next(value for name, value in model.named_parameters() if "position_embed" in name or "wpe" in name)
    with torch.no_grad():
        table.normal_()
        table[1 : 1 + first // 2] = 0  # as the row of a padding token
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    (read,) = bare_tables(tmp_path)
    assert read.start == first
    found = inspect_tables([read], "x", heads=model.config.num_attention_heads)
    expected = invariance.of_model(model, samples=table_inspection.SAMPLES)
    expected = [row for row in expected if row.quantity != "logits"]  # MPNet has a bias as well
    assert [row.quantity for row in found.invariances] == [row.quantity for row in expected]
    assert len([row for row in expected if row.head]) == model.config.num_attention_heads
    for ours, its in zip(found.invariances, expected, strict=True):
        assert (ours.first, ours.last, ours.head, ours.layer) == (its.first, its.last, its.head, its.layer)
        assert ours.r2 == pytest.approx(its.r2, abs=1e-9)
        assert ours.control.mean == pytest.approx(its.control.mean, abs=1e-9)


def test_without_heads_or_weights_a_notice_states_why():
    weights = {"query": random(32, 32), "key": random(32, 32)}
    with_weights = BareTable("wpe", random(), 0, weights)
    (notice,) = [x for x in inspect_tables([with_weights], "x").notices if x.startswith("heads")]
    assert "--heads N" in notice
    (notice,) = [x for x in inspected(random(), heads=4).notices if x.startswith("heads")]
    assert "No query and key weights" in notice
    assert not [x for x in inspect_tables([with_weights], "x", heads=4).notices if x.startswith("heads")]
    with pytest.raises(ValueError, match="32 rows, which 5 heads do not divide"):
        inspect_tables([with_weights], "x", heads=5)
    other_width = BareTable("wpe", random(width=16), 0, weights)
    assert not [row for row in inspect_tables([other_width], "x", heads=4).invariances if row.head]


def test_two_tables_of_one_model():
    tables = [BareTable(f"model.{part}.embed_positions.weight", random(rows), 0)
              for part, rows in (("decoder", 32), ("encoder", 64))]  # fmt: skip
    found = inspect_tables(tables, "x")
    assert [row.stack for row in found.invariances] == ["decoder"] * 3 + ["encoder"] * 3
    assert found.table.shape == (32, 32)
    assert any("the first of 2 tables" in notice for notice in found.notices)
    assert "position table of the decoder" in verdict(found)[0]
    tables = [BareTable(name, random(), 0) for name in ("a.wpe", "b.wpe")]
    assert "In the position table a.wpe, inner" in verdict(inspect_tables(tables, "x"))[0]


def test_long_tables_are_measured_in_part(monkeypatch):
    monkeypatch.setattr(table_inspection, "LONGEST", 20)
    found = inspected(random())
    assert {row.last for row in found.invariances} == {20}
    assert found.structure.last == 20
    assert any("cover positions 1–20 of 64" in notice for notice in found.notices)


def test_a_constant_table_leaves_a_notice():
    found = inspected(torch.ones(16, 4))
    assert found.structure is None
    assert any("no variance" in notice for notice in found.notices)
    assert not found.marks_the_first  # no row differs from the others


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tables.safetensors"
    save_file({"a.wpe": sinusoidal(64, 32).float(), "b.wpe": random()}, path)
    return path


def run(*words):
    done = locant_command("inspect", *words)
    return done.exit_code, " ".join(done.output.split())


def test_command_line(file, tmp_path):
    code, output = run(f"{file}::a.wpe", "-o", tmp_path / "page.html")
    assert code == 0, output
    assert "tables.safetensors::a.wpe • In the position table, inner products" in output
    assert "Toeplitz R² of 1.00" in output
    assert len(list((tmp_path / "page-csv").glob("*.csv"))) == 4


def test_tables_and_models_side_by_side(file, tmp_path, quick_inspection):
    code, output = run(f"{file}::a.wpe", "--compare", f"{file}::b.wpe", "-o", tmp_path / "two.html")
    assert code == 0, output
    assert output.count("inner products depend") == 2
    hf_models.make("bert").save_pretrained(tmp_path / "model")
    code, output = run(tmp_path / "model", "--compare", f"{file}::b.wpe", "-o", tmp_path / "mixed.html")
    assert code == 0, output
    assert "tables.safetensors::b.wpe" in (tmp_path / "mixed.html").read_text()


def test_a_checkpoint_without_its_config(tmp_path):
    hf_models.make("bert").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "weights.bin")
    for source in (tmp_path / "model", tmp_path / "weights.bin"):
        code, output = run(source, "--heads", 4, "-o", tmp_path / "page.html")
        assert code == 0, output
        assert "embeddings.position_embeddings.weight" in (tmp_path / "page.html").read_text()
        assert "heads of layer 1" not in output


def test_errors_of_the_command_line(file, tmp_path):
    hf_models.make("bert").save_pretrained(tmp_path / "model")
    for words, error in (
        ([file], "has 2 position tables; name one as"),
        ([f"{file}::c.wpe"], "did you mean"),
        ([f"{tmp_path}/nowhere::wpe"], "there is no file or folder"),
        ([f"{file}::a.wpe", "--text", __file__], "reads no text"),
        ([tmp_path / "model", "--heads", 4], "the number of heads is for position tables"),
        ([f"{file}::a.wpe", "--heads", 0], "expected a whole number ≥ 1"),
    ):
        code, output = run(*words, "-o", tmp_path / "page.html")
        assert code == 2
        assert error in output
        assert output.count("error:") == 1
    assert not (tmp_path / "page.html").exists()
