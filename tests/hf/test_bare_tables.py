"""Which tensors of weights without model code are position tables, and which weights belong to them."""

import pytest
import torch
from safetensors.torch import save_file

from locant.hf.bare_tables import bare_tables, first_position, is_bare, position_tables, split
from tests import hf_models


def weights(*names, rows=16, width=6):
    """Random tensors; layer-0 weights are square."""
    torch.manual_seed(0)
    square = ("query", "key", "_proj", "_lin", ".q.", ".k.")
    return {name: torch.randn(width if any(x in name for x in square) else rows, width).contiguous() for name in names}


def saved(path, tensors):
    save_file(tensors, path)
    return path


TABLES = [
    "gte-small.position_embeddings", "bert.embeddings.position_embeddings.weight", "wpe.weight",
    "transformer.wpe.weight", "model.decoder.embed_positions.weight", "pos_emb", "x.pos_embed",
    "text_model.embeddings.position_embedding.weight",
    "positional_embedding", "whisper-tiny.encoder.sinusoidal", "a.position_embeddings.fp16", "pos_encoder.pe",
]  # fmt: skip
OTHERS = [
    "bert.embeddings.word_embeddings.weight", "bert.embeddings.token_type_embeddings.weight",
    "decoder.relative_attention_bias", "encoder.relative_position_embeddings.weight", "rotary_pos_emb.table",
    "pos_embed.proj.weight", "position_embeddings.LayerNorm.weight", "h.0.swipe.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_names_of_tables(tmp_path, name):
    path = saved(tmp_path / "x.safetensors", weights(name, *OTHERS))
    assert list(position_tables(path)) == [name]


def test_a_table_is_2d_floats_with_8_rows(tmp_path):
    tensors = {
        "a.wpe": torch.randn(1, 16, 4), "b.wpe": torch.randn(7, 4), "c.wpe": torch.ones(16, 4).long(),
        "d.wpe": torch.randn(16), "e.wpe": torch.randn(8, 4),
    }  # fmt: skip
    assert list(position_tables(saved(tmp_path / "x.safetensors", tensors))) == ["e.wpe"]


def test_values_and_dtype_are_those_of_the_file(tmp_path):
    table = torch.randn(16, 4).half()
    found = position_tables(saved(tmp_path / "x.safetensors", {"wpe": table}))["wpe"]
    assert found.dtype == torch.float16
    assert torch.equal(found, table)


def test_any_tensor_can_be_named(tmp_path):
    path = saved(tmp_path / "x.safetensors", weights("where", "a.wpe", "b.wpe"))
    assert list(position_tables(f"{path}::where")) == ["where"]
    assert list(position_tables(path)) == ["a.wpe", "b.wpe"]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("bert.wpe.weigth", r"has no tensor 'bert.wpe.weigth' \(did you mean 'bert.wpe.weight'\?\).*\(16 × 6, F32\)"),
        ("", "has no tensor ''"),
        ("three", r"has the shape \[1, 16, 4\]; a position table is 2-D"),
        ("whole", "has the dtype I64; expected floating point"),
        ("short", "has 7 positions of width 4; expected 8 or more"),
        ("padded", "has 7 positions after 2 rows of padding"),
        ("nan", "nan contains NaN or infinity"),
        ("infinite", "contains NaN or infinity"),
    ],
)
def test_keys_that_are_refused(tmp_path, key, error):
    tensors = {
        **weights("bert.wpe.weight"), "three": torch.randn(1, 16, 4), "whole": torch.ones(16, 4).long(),
        "short": torch.randn(7, 4), "padded": torch.randn(9, 4), "nan": torch.randn(16, 4),
        "infinite": torch.randn(16, 4),
    }  # fmt: skip
    tensors["padded"][1] = 0
    tensors["nan"][0, 0] = torch.nan  # position 0, which R² leaves out
    tensors["infinite"][3, 1] = torch.inf
    path = saved(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ValueError, match=error):
        bare_tables(f"{path}::{key}")


def test_a_file_with_several_tables_must_be_asked_for_one(tmp_path):
    path = saved(tmp_path / "x.safetensors", weights("a.wpe", "b.wpe"))
    with pytest.raises(ValueError, match=r"has 2 position tables; .*a\.wpe \(16 × 6, F32\), b\.wpe \(16 × 6, F32\)"):
        bare_tables(path, of_one_model=True)
    assert [each.name for each in bare_tables(f"{path}::b.wpe", of_one_model=True)] == ["b.wpe"]
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "model.safetensors")
    assert [each.name for each in bare_tables(folder, of_one_model=True)] == ["a.wpe", "b.wpe"]


def test_no_table_lists_the_matrices(tmp_path):
    path = saved(tmp_path / "x.safetensors", {"bias": torch.randn(4), **weights("words")})
    with pytest.raises(ValueError, match=r"no tensor that looks like.*It has words \(16 × 6, F32\), bias \(4, F32\)"):
        position_tables(path)


def test_a_zero_row_is_padding():
    table = torch.randn(16, 4)
    assert first_position(table) == 0
    for row in (0, 1):
        padded = table.clone()
        padded[row] = 0
        assert first_position(padded) == row + 1
    padded = table.clone()
    padded[2] = 0  # a position as any other
    assert first_position(padded) == 0
    assert first_position(torch.zeros(16, 4)) == 0


BERT, LAYER = "embeddings.position_embeddings.weight", "encoder.layer.0.attention.self"


@pytest.mark.parametrize(
    ("table", "stored", "expected"),
    [
        (f"bert.{BERT}", [f"bert.{LAYER}.query.weight", f"bert.{LAYER}.key.weight"], {"query", "key"}),
        (BERT, [f"{LAYER}.query.weight", f"{LAYER}.key.weight"], {"query", "key"}),
        ("a.position_embeddings", [f"a.{LAYER}.query.weight", f"a.{LAYER}.key.weight"], {"query", "key"}),
        ("b.position_embeddings", [f"a.{LAYER}.query.weight", f"a.{LAYER}.key.weight"], set()),
        ("a.wpe", ["a.albert.encoder.layer.0.q.weight", "a.albert.encoder.layer.0.k.weight"], {"q", "k"}),
        ("wpe.weight", ["h.0.attn.c_attn.weight"], {"c_attn"}),
        ("pos_emb", ["layers.0.self_attn.in_proj_weight"], {"Wqkv"}),
        (BERT, ["encoder.layer.1.attention.self.query.weight"], set()),
        (
            "model.encoder.embed_positions.weight",
            ["model.encoder.layers.0.self_attn.q_proj.weight", "model.decoder.layers.0.self_attn.k_proj.weight"],
            {"q_proj"},
        ),
        ("m.encoder.sinusoidal", ["m.decoder.layers.0.self_attn.q_proj.weight"], set()),
        ("m.decoder.wpe", ["m.decoder.layers.0.encoder_attn.q_proj.weight"], set()),
    ],
)
def test_weights_of_the_same_model(tmp_path, table, stored, expected):
    path = saved(tmp_path / "x.safetensors", weights(table, *stored))
    (found,) = bare_tables(f"{path}::{table}")
    assert found.attention.keys() == expected


def test_a_layer_between_a_narrow_table_and_the_model(tmp_path):
    into = "a.albert.encoder.embedding_hidden_mapping_in.weight"
    query = "a.albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight"
    path = saved(tmp_path / "x.safetensors", weights("a.position_embeddings", into, query))
    (found,) = bare_tables(path)
    assert found.into is not None
    assert found.attention.keys() == {"query"}


def test_what_is_bare(tmp_path):
    hf_models.make("bert").save_pretrained(tmp_path / "model")
    model, config = tmp_path / "model", tmp_path / "model" / "config.json"
    assert not is_bare(str(model))
    assert not is_bare("owner/model")
    assert is_bare(f"{model}::wpe")
    assert is_bare(str(model / "model.safetensors"))
    assert not is_bare(str(config))
    config.write_text('{"model_type": "of-our-own"}')
    assert is_bare(str(model))
    config.write_text("{}")
    assert is_bare(str(model))
    config.unlink()
    assert is_bare(str(model))
    (model / "model.safetensors").unlink()
    assert not is_bare(str(model))


def test_a_path_may_have_colons(tmp_path):
    path = saved(tmp_path / "a::b.safetensors", weights("wpe"))
    assert split(path) == (path, None)
    assert list(position_tables(path)) == ["wpe"]
    assert split("x.safetensors::a::b") == (split("x.safetensors")[0], "a::b")


def test_hostile_names_are_left_out(tmp_path):
    """A name with line breaks or terminal codes, and one on which a search could take minutes."""
    names = ["a\n.wpe", "\x1b[31m.wpe", "h.0." * 100_000 + "wpe", "h.0." * 100_000 + "q.weight"]
    path = saved(tmp_path / "x.safetensors", weights(*names, "b.wpe"))
    assert list(position_tables(path)) == ["b.wpe"]
    with pytest.raises(ValueError, match="has no tensor") as error:
        position_tables(f"{path}::c.wpe")
    assert str(error.value).isprintable()
