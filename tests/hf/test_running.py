"""Short runs on a few tokens, or on one small image."""

import torch

from locant.hf.running import PROBE_LENGTH, probe_inputs, probe_length, probe_tokens, run_probe, vocabulary
from tests.hf_models import make


def test_the_patches_of_the_probe_image_all_differ():
    """Patches that are alike would hide what a scheme does: attention would mix equal vectors."""
    model, seen = make("vit"), []
    model.embeddings.patch_embeddings.projection.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    assert run_probe(model).shape == (1, 17, 32)
    (image, patches), *_ = seen
    assert image.shape == (1, 3, 16, 16)
    assert image.isfinite().all()
    vectors = patches[0].flatten(1).T
    assert torch.pdist(vectors).min() > 1e-3 * vectors.abs().max()


def test_tokens_of_a_probe_are_known_to_the_model_and_never_padding():
    model = make("roberta", vocab_size=8, pad_token_id=5)
    assert vocabulary(model) == 8
    assert probe_tokens(model, 9).tolist() == [[3, 4, 6, 7, 0, 1, 2, 3, 4]]
    assert probe_tokens(model, 4, stride=2).tolist() == [[3, 6, 0, 2]]


def test_encoder_and_decoder_get_unequal_lengths():
    model = make("t5")
    for length in (1, 2, 7):
        given = probe_inputs(model, probe_tokens(model, length))
        assert given["decoder_input_ids"].tolist() == [given["input_ids"][0, : max(1, length - 2)].tolist()]
    assert "decoder_input_ids" not in probe_inputs(make("bert"), probe_tokens(model, 3))


def test_a_probe_is_no_longer_than_the_model():
    assert probe_length(make("bert")) == PROBE_LENGTH
    assert probe_length(make("bert", max_position_embeddings=5)) <= 5
    assert probe_length(make("roberta", max_position_embeddings=5)) == 3  # two rows belong to no token
    assert probe_length(make("t5")) == PROBE_LENGTH
