"""Plans from config.json: whole, of possible sizes, and for this model."""

import copy

import pytest

import locant
from locant.hf.checkpoint import Weights
from locant.hf.plan import Plan, plan_of
from locant.hf.plan_check import check_fits, check_plan
from locant.hf.safetensors_header import Entry
from tests import hf_models


@pytest.fixture(scope="module")
def swapped():
    return locant.swap(hf_models.make("bert"), "tisa")


@pytest.fixture
def data(swapped):
    return copy.deepcopy(plan_of(swapped).to_config())


def change(data, path, value):
    """Sets an entry of nested dicts and lists; deletes it for None."""
    *above, last = path
    for each in above:
        data = data[each]
    if value is None:
        del data[last]
    else:
        data[last] = value


LAYER = ("stacks", 0, "layers", 1)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), 2, r"written by a newer locant \(format 2; this reads 1\)"),
        (("impl",), None, "the plan must have the entries format, impl"),
        (("more",), 1, "the plan must have the entries"),
        (("impl",), 3, "impl of the plan must be str, got 3"),
        (("impl",), "fast", "impl of the plan is 'fast'; expected auto, "),
        (("keep_native",), 1, "keep_native of the plan must be bool, got 1"),
        (("stacks",), [], "the plan needs stacks with different paths"),
        (("stacks", 0), 3, "stack 0 must have the entries path, width, .*; got 3"),
        (("stacks", 0, "width"), True, "width of stack 0 must be int, got True"),
        (("stacks", 0, "embed"), 3, "embed of stack 0 must be"),
        (("stacks", 0, "layers"), [], "stack 0 of the plan has no layers"),
        ((*LAYER, "scheme"), None, "layer 1 of stack 0 must have the entries module"),
        ((*LAYER, "n_heads"), "4", "n_heads of layer 1 of stack 0 must be int"),
        ((*LAYER, "n_heads"), 0, "n_heads × head_dim of layer 1 of stack 0 is 0; the weights allow 1 to 64"),
        ((*LAYER, "n_heads"), -4, "is 0; the weights allow"),
        ((*LAYER, "head_dim"), 17, "is 68; the weights allow 1 to 64"),
        (("stacks", 0, "width"), 65, "width of layer 0 of stack 0 is 65; the weights allow 1 to 64"),
        (("stacks", 0, "width"), 0, "is 0; the weights allow 1 to 64"),
        ((*LAYER, "same_as"), "nowhere", "shares the scheme of 'nowhere', which is not an earlier layer"),
    ],
)
def test_plans_that_are_damaged(path, value, words, data):
    weights = Weights(9, {"a": Entry("F32", (64, 32), 0, 8)})
    assert data["stacks"][0]["layers"][0]["n_heads"] == 4
    check_plan(data, weights)
    check_plan(data, None)
    change(data, path, value)
    with pytest.raises(ValueError, match=words):
        check_plan(data, weights)


@pytest.mark.parametrize(("heads", "fits"), [(2**16, True), (2**16 + 1, False)])
def test_without_weights_sizes_have_a_limit_too(heads, fits, data):
    data["stacks"][0]["layers"][0] |= {"n_heads": heads, "head_dim": 16}
    if fits:
        check_plan(data, None)
    else:
        with pytest.raises(ValueError, match="the weights allow 1 to 1,048,576"):
            check_plan(data, None)


def test_modules_and_paths_are_there_once(data):
    first, second = data["stacks"][0]["layers"][:2]
    twice = copy.deepcopy(data)
    twice["stacks"][0]["layers"][1]["module"] = first["module"]
    with pytest.raises(ValueError, match=r"the plan has .* twice"):
        check_plan(twice, None)
    other = copy.deepcopy(data)
    other["stacks"][0]["layers"][1] |= {"same_as": first["module"], "scheme": "alibi"}  # not the scheme of the first
    with pytest.raises(ValueError, match="which is not an earlier layer with the same scheme"):
        check_plan(other, None)
    second["same_as"] = first["module"]
    check_plan(data, None)
    more = copy.deepcopy(data["stacks"][0])
    for layer in more["layers"]:
        layer |= {"module": "x" + layer["module"], "same_as": "x" + layer["same_as"]}
    data["stacks"].append(more)
    with pytest.raises(ValueError, match="needs stacks with different paths"):
        check_plan(data, None)


def test_older_folders_lack_some_entries(data):
    for name in ("unlearned", "imports", "family"):
        data.pop(name, None)
    del data["stacks"][0]["native_count"]
    check_plan(data, None)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("stacks", 0, "path"), "decoder", r"the plan has the stacks \['decoder'\], but BertModel has \[''\]"),
        (("stacks", 0, "width"), 48, "width of a stack is 48 in the plan; the model has"),
        (
            ("stacks", 0, "layers", 0),
            None,
            "the plan has no encoder.layer.0.*; the model has 2 such layers, the plan 1",
        ),
        (
            (*LAYER, "module"),
            "encoder.layer.7.attention.self",
            "the plan names 'encoder.layer.7.attention.self', which",
        ),
        ((*LAYER, "n_heads"), 2, "n_heads of encoder.layer.1.* is 2 in the plan; the model has 4"),
        ((*LAYER, "head_dim"), 4, "head_dim of encoder.layer.1.* is 4 in the plan; the model has"),
        (("stacks", 0, "embed"), "alibi", "embed of a stack is alibi, which adds nothing to token embeddings"),
        (
            (*LAYER, "scheme"),
            "sinusoidal",
            r"the scheme of encoder\.layer\.1\..* is sinusoidal, but sinusoidal is added to",
        ),
        ((*LAYER, "scheme"), "alibi+learned:length=9", r"is alibi\+learned:length=9, but learned:length=9 is added to"),
    ],
)
def test_a_plan_for_another_model(path, value, words, data, swapped):
    model = hf_models.make("bert")
    check_fits(Plan.from_config(data), model)
    change(data, path, value)
    with pytest.raises(ValueError, match=words):
        check_fits(Plan.from_config(data), model)
