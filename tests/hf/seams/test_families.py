"""The records of families with a seam, one by one: a wrong entry shows in a padded batch."""

import torch

import locant
from locant.hf.seam import through_seam
from locant.hf.seams.families import SEAM_FAMILIES
from tests import hf_models, seam_models
from tests.hf_models import output

TABLES = ("mpnet", "rembert", "megatron-bert", "squeezebert", "luke", "tapas")
TABLES_OF_DECODERS = ("gpt_neo", "imagegpt", "fsmt")
ROTATIONS = ("roformer", "gptj", "codegen", "gpt_neox_japanese", "falcon")
BIASES = ("bloom", "mpt", "falcon, alibi")
VECTORS = ("deberta", "deberta-v2", "xlnet")


def made(kind):
    if kind == "mpnet":
        return hf_models.make(kind)
    return (seam_models.make if kind in seam_models.CONFIGS else seam_models.make_more)(kind)


def padded(kind):
    given = seam_models.inputs(kind, length=6, padding="left")
    if kind == "fsmt":
        given |= {"decoder_input_ids": given["input_ids"].flip(1)[:, :4].clamp(min=3), "use_cache": False}
    return given


def check(kinds):
    """Positions are read and counted as the model does. Some families count padding on the left, some do not."""
    for kind in kinds:
        model, given = made(kind), padded(kind)
        real = ... if kind == "fsmt" else given["attention_mask"].bool()  # FSMT's outputs are its decoder's
        before = output(model, **given)
        with through_seam(model):
            assert torch.equal(output(model, **given), before), kind
        locant.swap(model, locant.native(model))
        far = (output(model, **given) - before)[real].abs().max()
        assert far <= 2e-5 * before.abs().max(), kind
        locant.swap(model, "native")
        assert torch.equal(output(model, **given), before), kind


def test_every_record_is_tested_here():
    every = (*TABLES, *TABLES_OF_DECODERS, *ROTATIONS, *BIASES, *VECTORS)
    assert {kind.partition(",")[0] for kind in every} == SEAM_FAMILIES.keys()


def test_tables_of_encoders():
    check(TABLES)


def test_tables_of_decoders():
    check(TABLES_OF_DECODERS)


def test_rotations():
    check(ROTATIONS)


def test_biases():
    check(BIASES)


def test_vectors_of_offsets():
    check(VECTORS)
