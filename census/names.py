"""Which architectures of transformers read text, and which class stands for each of them.

An architecture has the name of its folder in `transformers/models`. It counts as text if transformers lists one of its
model types for causal or masked language modelling, for text to text, or as a text encoder. Two tables correct this:
`ADDED` names architectures that read tokens and are in none of these lists, `NOT_TEXT` those in a list that need an
image or a sound. Where a folder holds several models, `ADDED` names the one that reads text.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

ENCODER, DECODER, BOTH = "encoder", "decoder", "encoder-decoder"

ADDED: dict[str, tuple[str, str]] = {
    "bark": (DECODER, "BarkSemanticModel"),
    "blip_text": (ENCODER, "BlipTextModel"),
    "bros": (ENCODER, "BrosModel"),
    "canine": (ENCODER, "CanineModel"),
    "chameleon": (DECODER, "ChameleonForConditionalGeneration"),
    "clip": (ENCODER, "CLIPTextModel"),
    "clvp": (DECODER, "ClvpForCausalLM"),
    "csm": (DECODER, "CsmForConditionalGeneration"),
    "cosmos3_edge": (DECODER, "Cosmos3EdgeTextModel"),
    "data2vec_text": (ENCODER, "Data2VecTextForMaskedLM"),
    "dia": (BOTH, "DiaForConditionalGeneration"),
    "dpr": (ENCODER, "DPRQuestionEncoder"),
    "embedding_gemma2": (ENCODER, "EmbeddingGemma2TextModel"),
    "emu3": (DECODER, "Emu3ForCausalLM"),
    "esmfold": (ENCODER, "EsmForProteinFolding"),
    "evolla": (DECODER, "EvollaForProteinText2Text"),
    "fastspeech2_conformer": (BOTH, "FastSpeech2ConformerModel"),
    "fuyu": (DECODER, "FuyuForCausalLM"),
    "glm4v": (DECODER, "Glm4vTextModel"),
    "glm4v_moe": (DECODER, "Glm4vMoeTextModel"),
    "glm5_next": (DECODER, "Glm5NextTextModel"),
    "glm_image": (DECODER, "GlmImageTextModel"),
    "glm_ocr": (DECODER, "GlmOcrTextModel"),
    "higgs_audio_v2": (DECODER, "HiggsAudioV2ForConditionalGeneration"),
    "hunyuan_vl": (DECODER, "HunYuanVLTextModel"),
    "imagegpt": (DECODER, "ImageGPTForCausalImageModeling"),
    "kosmos2_5": (DECODER, "Kosmos2_5TextForCausalLM"),
    "kyutai_speech_to_text": (DECODER, "KyutaiSpeechToTextForConditionalGeneration"),
    "layoutlm": (ENCODER, "LayoutLMForMaskedLM"),
    "lilt": (ENCODER, "LiltModel"),
    "llama4": (DECODER, "Llama4ForCausalLM"),
    "longt5": (BOTH, "LongT5ForConditionalGeneration"),
    "lxmert": (ENCODER, "LxmertModel"),
    "markuplm": (ENCODER, "MarkupLMModel"),
    "mistral4": (DECODER, "Mistral4ForCausalLM"),
    "mistral_large4": (DECODER, "MistralLarge4TextModel"),
    "mllama": (DECODER, "MllamaForCausalLM"),
    "molmo2": (DECODER, "Molmo2TextModel"),
    "moshi": (DECODER, "MoshiForCausalLM"),
    "muse_glimmer": (DECODER, "MuseGlimmerTextModel"),
    "muse_spark": (DECODER, "MuseSparkTextModel"),
    "musicgen": (DECODER, "MusicgenForCausalLM"),
    "musicgen_melody": (DECODER, "MusicgenMelodyForCausalLM"),
    "openai_privacy_filter": (ENCODER, "OpenAIPrivacyFilterModel"),
    "phi4_multimodal": (DECODER, "Phi4MultimodalForCausalLM"),
    "pop2piano": (BOTH, "Pop2PianoForConditionalGeneration"),
    "qwen2_5_vl": (DECODER, "Qwen2_5_VLTextModel"),
    "qwen2_vl": (DECODER, "Qwen2VLTextModel"),
    "qwen3_vl": (DECODER, "Qwen3VLTextModel"),
    "qwen3_vl_moe": (DECODER, "Qwen3VLMoeTextModel"),
    "splinter": (ENCODER, "SplinterModel"),
    "tapas": (ENCODER, "TapasModel"),
    "tipsv2": (ENCODER, "Tipsv2TextModel"),
    "trocr": (DECODER, "TrOCRForCausalLM"),
    "udop": (BOTH, "UdopForConditionalGeneration"),
    "video_llava": (DECODER, "VideoLlavaForConditionalGeneration"),
    "visual_bert": (ENCODER, "VisualBertModel"),
    "vits": (ENCODER, "VitsModel"),
}
"""Folder, or a part of one -> kind and class, where transformers' lists lack it or name a class with other inputs."""

NOT_TEXT: dict[str, str] = {
    "audioflamingo3": "sound; its text part is qwen2",
    "data2vec": "its text part is data2vec_text",
    "encoder_decoder": "two other architectures",
    "gemma4_assistant": "reads the cache of another model",
    "gemma4_unified_assistant": "reads the cache of another model",
    "git": "images",
    "glmasr": "sound",
    "got_ocr2": "images; its text part is qwen2",
    "gpt_sw3": "the model class is that of gpt2",
    "granite_speech": "sound; its text part is granite",
    "granite_speech_plus": "sound; its text part is granite",
    "modernvbert": "images; its text part is modernbert",
    "moss_transcribe_diarize": "sound; its text part is qwen3",
    "musicflamingo": "sound; its text part is qwen2",
    "nemotron3_5_transcribe": "sound",
    "perceiver": "its layers attend to latent vectors, not to tokens",
    "qwen2_audio": "sound; its text part is qwen2",
    "qwen3_asr": "sound; its text part is qwen3",
    "ultravbert": "images; its text part is ultrabert",
    "vibevoice_asr": "sound; its text part is qwen2",
    "voxtral": "sound; its text part is llama",
    "voxtral_realtime": "its text part needs the time of a sound",
    "whisper": "sound",
}
"""Folders in transformers' lists that are left out, and why."""


@dataclass(frozen=True)
class Architecture:
    """One architecture: its name, its kind, and the class that is built."""

    name: str
    kind: str  # ENCODER, DECODER or BOTH
    model_class: str

    def load(self) -> Any:
        """Returns the class."""
        return getattr(transformers, self.model_class, None) or _inside(self.name, self.model_class)


def _inside(folder: str, name: str) -> Any:
    """A class that transformers does not export at its top."""
    path = {"blip_text": "blip.modeling_blip_text"}.get(folder, f"{folder}.modeling_{folder}")
    return getattr(importlib.import_module(f"transformers.models.{path}"), name)


def _listed() -> Iterator[tuple[str, str, str]]:
    """Folder, kind and class of every model type in transformers' lists of text models.

    The order decides: BERT is listed for causal models too and is an encoder, BART for masked ones and has a decoder.
    """
    for kind, names in (
        (BOTH, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        (ENCODER, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        (ENCODER, auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
        (DECODER, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ):
        first = {model_type: each if isinstance(each, str) else each[0] for model_type, each in names.items()}
        # Of a folder with several classes take the text model: `ForConditionalGeneration` reads images too.
        for model_type in sorted(first, key=lambda each: "ForConditionalGeneration" in first[each]):
            yield model_type_to_module_name(model_type), kind, first[model_type]


def architectures() -> list[Architecture]:
    """Returns all of them by name."""
    found = {name: Architecture(name, *entry) for name, entry in ADDED.items()}
    for folder, kind, model_class in _listed():
        if folder not in NOT_TEXT:
            found.setdefault(folder, Architecture(folder, kind, model_class))
    return [found[name] for name in sorted(found)]


def config_class(model_class: Any) -> Any:
    """Returns the class of a model's config: what its constructor takes, which may be an inner config."""
    hint = inspect.get_annotations(model_class.__init__).get("config")
    found = vars(importlib.import_module(model_class.__module__)).get(hint, hint) if hint else None
    known = inspect.isclass(found) and issubclass(found, PreTrainedConfig) and found is not PreTrainedConfig
    return found if known else model_class.config_class
