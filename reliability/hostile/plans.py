"""Plans in config.json that are damaged, or that fit another model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForMaskedLM

import locant
from reliability.hostile.case import Attack, Cases, edit, model_folder, setting, without

CASES = Cases("plan")
PLAN = ("locant", "locant")
STACK = (*PLAN, "stacks", 0)
LAYER = (*STACK, "layers", 0)
TISA = "tisa:kernels=3"


def with_plan(change, kind: str = "bert", spec: str = TISA, auto=None) -> Attack:
    """Opens a swapped model with a changed plan."""

    def attack(folder: Path) -> object:
        model_folder(folder, kind, spec)
        edit(folder / "config.json", change)
        return locant.load(folder, auto)

    return attack


def doubled(*names):
    """A change that repeats the first entry of a list."""

    def change(data) -> None:
        for name in names:
            data = data[name]
        data.append(data[0])

    return change


FIELDS = [
    ("no stacks", setting([], *PLAN, "stacks"), "stacks"),
    ("stacks missing", without(*PLAN, "stacks"), "must have the entries format, impl"),
    ("stacks are a number", setting(7, *PLAN, "stacks"), "stacks of the plan must be list"),
    ("a stack is a string", setting(["x"], *PLAN, "stacks"), "stack 0 must have the entries"),
    ("last layer missing", without(*STACK, "layers", -1), "has no encoder.layer.1.attention.self"),
    ("first layer missing", without(*STACK, "layers", 0), "has no encoder.layer.0.attention.self"),
    ("no layers", setting([], *STACK, "layers"), "has no layers"),
    ("a layer twice", doubled(*STACK, "layers"), "twice"),
    ("a stack twice", doubled(*PLAN, "stacks"), "twice"),
    ("a module that is not there", setting("encoder.layer.9.attention.self", *LAYER, "module"), "shares the scheme"),
    ("a module elsewhere", setting("pooler", *LAYER, "module"), "shares the scheme"),
    ("n_heads of a billion", setting(10**9, *LAYER, "n_heads"), "n_heads × head_dim"),
    ("head_dim of a billion", setting(10**9, *LAYER, "head_dim"), "n_heads × head_dim"),
    ("head_dim with 4,000 digits", setting(10**4000, *LAYER, "head_dim"), "n_heads × head_dim"),
    ("n_heads of zero", setting(0, *LAYER, "n_heads"), "n_heads × head_dim"),
    ("n_heads negative", setting(-4, *LAYER, "n_heads"), "n_heads × head_dim"),
    ("n_heads as text", setting("4", *LAYER, "n_heads"), "n_heads of layer 0 of stack 0 must be int"),
    ("n_heads true", setting(True, *LAYER, "n_heads"), "n_heads of layer 0 of stack 0 must be int"),
    ("n_heads of another model", setting(2, *LAYER, "n_heads"), "n_heads of encoder.layer.0.attention.self is 2"),
    ("head_dim of another model", setting(3, *LAYER, "head_dim"), "head_dim of encoder.layer.0.attention.self is 3"),
    ("width of another model", setting(16, *STACK, "width"), "width of a stack is 16"),
    ("width of a billion", setting(10**9, *STACK, "width"), "width of layer 0"),
    ("width missing", without(*STACK, "width"), "must have the entries path, width"),
    ("another format", setting(2, *PLAN, "format"), "written by a newer locant"),
    ("format missing", without(*PLAN, "format"), "written by a newer locant"),
    ("unknown impl", setting("/bin/sh", *PLAN, "impl"), "impl of the plan"),
    ("impl is a list", setting([], *PLAN, "impl"), "impl of the plan must be str"),
    ("keep_native as text", setting("yes", *PLAN, "keep_native"), "keep_native of the plan must be bool"),
    ("unlearned as text", setting("no", *PLAN, "unlearned"), "unlearned of the plan must be bool"),
    ("native_count as a number", setting(1, *STACK, "native_count"), "native_count of stack 0 must be bool"),
    ("native positions that are gone", setting(True, *PLAN, "keep_native"), "missing_keys"),
    ("an embedding without weights", setting("learned:length=40", *STACK, "embed"), "missing_keys"),
    ("an embedding of a billion", setting("learned:length=1000000000", *STACK, "embed"), "numbers"),
    ("an unknown scheme", setting("os.system", *LAYER, "scheme"), "unknown scheme 'os.system'"),
    ("a scheme is a number", setting(3, *LAYER, "scheme"), "scheme of layer 0 of stack 0 must be str"),
    ("shared with nobody", setting("nobody", *LAYER, "same_as"), "shares the scheme of 'nobody'"),
    ("shared with a later layer", setting("encoder.layer.1.attention.self", *LAYER, "same_as"), "shares the scheme"),
    ("an unknown entry", setting("rm", *LAYER, "command"), "must have the entries module"),
    ("the plan is null", setting(None, *PLAN), "the plan must have the entries"),
    ("the plan is missing", without(*PLAN), "the plan must have the entries"),
    ("no inner config", setting([1], "locant"), "must have an object 'locant'"),
    ("an unknown family", setting("evil", "locant", "family"), "evil"),
    ("a family is a list", setting([], "locant", "family"), "must have an object 'locant'"),
    ("another family", setting("llama", "locant", "family"), "BertModel"),
    ("the path of another stack", setting("encoder", *STACK, "path"), "the plan has the stacks"),
    ("a path with dots", setting("../..", *STACK, "path"), "the plan has the stacks"),
]
for name, change, says in FIELDS:
    CASES.add(name, says, with_plan(change))


def in_every_layer(text: str, number: int | None = None):
    """A change of the scheme of every layer, or of one."""

    def change(data) -> None:
        for index, layer in enumerate(data["locant"]["locant"]["stacks"][0]["layers"]):
            if number is None or index == number:
                layer["scheme"] = text

    return change


for name, text, says in [
    ("an unknown scheme in every layer", "tisaa", "unknown scheme 'tisaa'"),
    ("weights of another size", "tisa:kernels=4", "mismatched_keys"),
    ("a scheme that is too large", "tisa:kernels=1000000000000", "kernels=1000000000000"),
    ("weights that no layer has", "nope", "unexpected_keys"),
    ("a very long scheme", "tisa+" * 100_000 + "tisa", "characters"),
]:
    CASES.add(name, says, with_plan(in_every_layer(text)))
CASES.add("one layer without its scheme", "unexpected_keys", with_plan(in_every_layer("nope", 1)))
CASES.add(
    "the same, opened as another class",
    "unexpected_keys",
    with_plan(in_every_layer("nope", 1), auto=AutoModelForMaskedLM),
)
CASES.add(
    "an embedding dropped", "unexpected_keys", with_plan(setting(None, *STACK, "embed"), spec="learned:length=40")
)
CASES.add("a decoder missing", "the plan has the stacks", with_plan(without(*PLAN, "stacks", 1), kind="t5"))
CASES.add("an encoder missing", "the plan has the stacks", with_plan(without(*PLAN, "stacks", 0), kind="t5"))
CASES.add(
    "a layer of the decoder missing",
    "has no decoder.block.1",
    with_plan(without(*PLAN, "stacks", 1, "layers", 1), kind="t5"),
)
CASES.add(
    "a layer of llama missing", "has no layers.1", with_plan(without(*STACK, "layers", 1), kind="llama", spec="alibi")
)
CASES.add(
    "the heads of alibi",
    "n_heads of layers.0.self_attn is 1",
    with_plan(setting(1, *LAYER, "n_heads"), kind="llama", spec="alibi"),
)
