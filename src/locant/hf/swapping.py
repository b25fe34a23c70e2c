"""`swap`: another position scheme for a loaded model, in place, with everything else kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from locant.attention import BACKENDS
from locant.hf.attaching import attach, detach, own_config
from locant.hf.family import Family
from locant.hf.family_record import to_json
from locant.hf.finding import family_of
from locant.hf.finite import check_finite
from locant.hf.interrupts import check, deferred
from locant.hf.mapped_native import is_mapped_native, mapped_native
from locant.hf.modes import evaluating
from locant.hf.plan import Attention, Plan, StackPlan, plan_of
from locant.hf.probing import find_attentions, probe_through_seam
from locant.hf.proving import prove
from locant.hf.readout import Native
from locant.hf.saving import save_pretrained
from locant.hf.word_order import WordOrderWarning, advice, is_native, loses_word_order
from locant.schemes import Nope, Scheme, Sum
from locant.spec import per_layer

Spec = str | Scheme | Native | Sequence[str | Scheme]


def swap(model: PreTrainedModel, spec: Spec, *, impl: str = "auto", keep_native: bool = False) -> PreTrainedModel:
    """Gives a model another position scheme, in place, and returns it.

    spec          a string ("tisa:kernels=5": a scheme of its own for every layer; "rope/nope": repeated over the
                  layers), a scheme (shared by all layers), a list with one of these per layer, the result of `native`,
                  "native@grouped:size=4" (the model's own positions within a map), the same with "+local" or another
                  scheme added, or "native" to restore them.
    impl          the back end of `locant.attend`.
    keep_native   add the scheme to the model's own positions instead of replacing them.

    Schemes become submodules of the attention modules, as `….locant`. Native positions are removed exactly: the rest
    computes what the model would compute without positions. A probe runs the model on a few tokens and checks that
    every layer uses its scheme, that position changes the output, and that the model's own positions are gone. If one
    of them is not so, it raises and the model is unchanged.

    A swap does not train the scheme. A model that was trained with other positions then no longer knows word order, and
    `swap` issues a `locant.hf.WordOrderWarning`. `locant.fit` and `locant.adapt` keep word order.
    """
    check_model(model)
    if not is_native(spec):
        check_finite(model)  # the probe could not tell such weights from positions without effect
    lost = loses_word_order(model, spec, keep_native=keep_native)
    exchange(model, spec, impl=impl, keep_native=keep_native, unlearned=lost)
    if lost:
        warnings.warn(advice(model, spec), WordOrderWarning, stacklevel=2)
    return model


@deferred()  # Ctrl-C must not leave a model that is half swapped
@torch.inference_mode(mode=False)  # parameters that are made in inference mode can never be trained
def exchange(
    model: PreTrainedModel, spec: Spec, *, impl: str = "auto", keep_native: bool = False, unlearned: bool = False
) -> PreTrainedModel:
    """Does what `swap` does, without a warning: for callers that fit or train the scheme, or undo the swap.

    unlearned   whether the model was trained with other positions, and the scheme was not.
    """
    check_model(model)
    if impl != "auto" and impl not in BACKENDS:
        raise ValueError(f"unknown impl {impl!r}; choose one of: auto, {', '.join(BACKENDS)}")
    added = ""  # schemes beside the model's own positions
    if isinstance(spec, str) and is_mapped_native(spec):
        if keep_native:
            raise ValueError(f"{spec!r} is made of the model's own positions; leave out keep_native=True")
        spec, added = mapped_native(model, spec)
    old = plan_of(model)
    if is_native(spec):
        if old is not None:
            _need_native(old, "put back")
            detach(model)
        return model
    if keep_native and old is not None:
        _need_native(old, "kept")
    if old is None:
        family = family_of(model)
        own_config(model)
        found = find_attentions(model, family)
    else:  # known from the first swap; the native positions may be gone, so a probe could not run
        detach(model)
        family = family_of(model)
        found = {stack.path: stack.attentions for stack in old.stacks}
    lost = old is not None and old.native_is_lost
    try:
        plan = Plan(_resolve(model, family, found, spec, added, keep_native), impl, keep_native, native_is_lost=lost,
                    unlearned=unlearned, family=to_json(model))  # fmt: skip
        try:
            attach(model, plan, save_pretrained)
            prove(model, plan)
            check()
        except BaseException:
            detach(model)
            raise
    except BaseException:
        if old is not None:
            attach(model, old, save_pretrained)
        raise
    return model


@contextmanager
def native_as_schemes(model: PreTrainedModel) -> Iterator[None]:
    """Runs a model with its own positions as schemes, so that observers of attention get them as a `request`.

    A swapped model has schemes already. The model is in eval mode meanwhile, and the caller's random numbers stay as
    they were: an analysis in the middle of a training must not change the training.
    """
    with torch.random.fork_rng(devices=[]), evaluating(model):
        if plan_of(model) is not None:
            yield
            return
        try:
            exchange(model, "nope", keep_native=True)
            yield
        finally:
            restore(model)


@deferred()
def restore(model: PreTrainedModel) -> None:
    """Gives a model its own positions again, if an `exchange` got as far as to replace them."""
    if plan_of(model) is not None:
        exchange(model, "native")


def check_model(model: PreTrainedModel) -> None:
    """Raises TypeError or ValueError unless the model can be swapped."""
    if not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):
            raise TypeError("the model is compiled; swap it first, then call torch.compile")
        hint = "; swap its transformer: model[0].auto_model" if type(model).__name__ == "SentenceTransformer" else ""
        hint = f"; open it first: locant.load({str(model)!r})" if isinstance(model, str | Path) else hint
        raise TypeError(f"swap takes a model of transformers, got {type(model).__name__}{hint}")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise TypeError("the model is compiled; swap it first, then call compile")
    if getattr(model.config, "return_dict", True) is False:
        raise ValueError("the model's config has return_dict=False; set model.config.return_dict = True")
    method = getattr(model, "quantization_method", None)
    # Transformers opens GGUF files in floating point, and still calls them quantised.
    quantized = getattr(model, "is_quantized", False) and method != QuantizationMethod.GGUF
    if quantized or not next(model.parameters()).is_floating_point():
        raise ValueError(
            f"the weights of the model are quantised{f' ({method})' if method else ''}; a swap needs floating point: "
            f"load it without quantization_config, or with its option to dequantize"
        )
    if next(model.parameters()).is_meta:
        raise ValueError("the model has no weights yet (its parameters are on the meta device); load them first")


def _need_native(plan: Plan, what: str) -> None:
    if plan.native_is_lost:
        raise ValueError(
            f"the native positions cannot be {what}: this model was opened from a folder that holds only the "
            f"new positions; load the original model"
        )


def _resolve(
    model: PreTrainedModel, family: Family, found: dict[str, list[Attention]], spec: Spec, added: str, keep_native: bool
) -> list[StackPlan]:
    """Builds the schemes of every stack and splits them into token embeddings and attention."""
    base, total = model.base_model, sum(map(len, found.values()))
    if not isinstance(spec, (str, Scheme, Native, Sequence)):
        raise TypeError(f"spec must be a string, a scheme or a list with one per layer, got {type(spec).__name__}")
    if isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) != total:
        hint = " (it runs one attention module in all of its layers)" if model.config.model_type == "albert" else ""
        raise ValueError(f"a list of schemes needs one per layer: got {len(spec)} for {total} attention modules{hint}")
    if isinstance(spec, Native) and len(spec.stacks) != len(found):
        raise ValueError(
            f"these positions were read from {len(spec.stacks)} stacks of layers, this model has {len(found)}"
        )
    plans, done = [], 0
    for index, (path, attentions) in enumerate(found.items()):
        stack = base.get_submodule(path)
        width, here = family.mechanism.width(stack), next(stack.parameters())
        layers: list[Scheme]
        embed: Scheme | None = None
        native_count = False
        if isinstance(spec, Native):
            read = spec.stacks[index]
            native_count = read.native_count
            if read.layers is not None and len(read.layers) != len(attentions):
                raise ValueError(f"these positions are for {len(read.layers)} layers, this model has {len(attentions)}")
            # Copies: two models must not share parameters.
            embed, layers = copy.deepcopy((read.embed, read.layers or [Nope()] * len(attentions)))
            if added:
                more, new = _split(_built(added, attentions, width, stack))
                embed = _sum([each for each in (embed, more) if each is not None])
                layers = [_sum([own, each]) or each for own, each in zip(layers, new, strict=True)]
        else:
            entries = spec if isinstance(spec, (str, Scheme)) else spec[done : done + len(attentions)]
            embed, layers = _split(_built(entries, attentions, width, stack))
        if keep_native:
            modules = [base.get_submodule(attention.name) for attention in attentions]
            own = family.mechanism.read(stack, modules, partial(probe_through_seam, model))
            native_count = native_count or not own.shift_invariant
            if own.layers is not None:
                # A copy per layer: a table shared by several sums would be saved more than once.
                layers = [_sum([copy.deepcopy(mine), new]) or new for mine, new in zip(own.layers, layers, strict=True)]
        _fit(layers, embed, attentions, width)
        for scheme in [*layers, *([embed] if embed is not None else [])]:
            scheme.to(here.device, here.dtype)
        plans.append(StackPlan(path, attentions, layers, embed, width, native_count))
        done += len(attentions)
    return plans


def _built(
    spec: str | Scheme | Sequence[str | Scheme], attentions: list[Attention], width: int, stack: Any
) -> list[Scheme]:
    """The scheme of every attention, built for its own sizes: in some models those of sliding layers differ."""
    sizes = [(attention.n_heads, attention.head_dim) for attention in attentions]

    def build(d_model: int) -> list[Scheme]:
        found: dict[tuple[int, int], Any] = {}
        for n_heads, head_dim in dict.fromkeys(sizes):
            dims = {"n_heads": n_heads, "head_dim": head_dim, "d_model": d_model}
            found[n_heads, head_dim] = per_layer(spec, len(attentions), **dims)
        return [found[size][layer] for layer, size in enumerate(sizes)]

    built, of_states = build(width), getattr(getattr(stack, "config", None), "hidden_size", width)
    # ELECTRA's token embeddings are narrower than the hidden states that a scheme reads.
    return build(of_states) if of_states != width and any(scheme.reads for scheme in built) else built


def _split(built: list[Scheme]) -> tuple[Scheme | None, list[Scheme]]:
    """Splits schemes into absolute positions, added once before the first layer, and the schemes of each layer."""
    embeds, layers, split = [], [], {}
    for scheme in built:
        if id(scheme) not in split:
            parts = scheme.parts_of_sum()
            added = [part for part in parts if _embeds(part)]
            rest = [part for part in parts if part not in added]
            split[id(scheme)] = (_sum(added), scheme if not added else (_sum(rest) or Nope()))
        embed, layer = split[id(scheme)]
        embeds.append(embed)
        layers.append(layer)
    texts = {str(embed) for embed in embeds}
    if len(texts) > 1:
        raise ValueError(
            f"absolute positions are added once, before the first layer, so every layer must name the same ones; "
            f"got {', '.join(sorted(texts))}"
        )
    return embeds[0], layers


def _embeds(scheme: Scheme) -> bool:
    """Whether a scheme adds to the token embeddings. One that also acts in attention is refused."""
    here = next(scheme.parameters(), torch.empty(0)).device
    one = torch.zeros(1, dtype=torch.long, device=here)
    if scheme.embed(one) is None:
        return False
    if scheme.terms(one).used() or scheme.rotates or scheme.has_sides:
        raise NotImplementedError(
            f"{scheme} both embeds positions and acts in attention; write two schemes and add them with Sum"
        )
    return True


def _sum(schemes: list[Scheme]) -> Scheme | None:
    kept = [scheme for scheme in schemes if not scheme.silent] or schemes
    return None if not kept else kept[0] if len(kept) == 1 else Sum(*kept)


def _fit(layers: list[Scheme], embed: Scheme | None, attentions: list[Attention], width: int) -> None:
    for scheme, attention in zip(layers, attentions, strict=True):
        for dim, size in (("n_heads", attention.n_heads), ("head_dim", attention.head_dim)):
            built = getattr(scheme, dim, size)
            if built != size:
                raise ValueError(f"{scheme} was built for {dim}={built}, {attention.name} has {size}")
    if embed is not None and getattr(embed, "d_model", width) != width:
        raise ValueError(f"{embed} was built for d_model={embed.d_model}, the token embeddings have {width}")
