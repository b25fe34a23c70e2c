"""GLUE: the files of its nine tasks, its metrics against other code, and the errors for malformed files."""

import gzip
import lzma
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from locant.experiments import arms
from locant.experiments.presets import FINETUNE
from locant.experiments.tasks import DETAILED, find_task
from locant.experiments.tasks.glue import KINDS, Undefined
from locant.experiments.tasks.task import Setting
from locant.runs.glue_files import FORMATS
from tests import bert

PRESET = replace(FINETUNE["quick"], length=48, batch=4)
MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
HEADERS = {
    "SST-2": ["sentence", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "STS-B": [
        "index",
        "genre",
        "filename",
        "year",
        "old_index",
        "source1",
        "source2",
        "sentence1",
        "sentence2",
        "score",
    ],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "WNLI": ["index", "sentence1", "sentence2", "label"],
    "MNLI": [*MNLI.split(), "sentence1", "sentence2", "label1", "gold_label"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
}
# As the official files have them: the label of each task, and its number.
LABELS = {name: [("0", 0), ("1", 1)] for name in ("CoLA", "SST-2", "MRPC", "WNLI", "QQP")} | {
    "STS-B": [("0", 0.0), ("3.75", 3.75), ("5.000", 5.0)],
    "RTE": [("entailment", 0), ("not_entailment", 1)],
    "QNLI": [("entailment", 0), ("not_entailment", 1)],
    "MNLI": [("entailment", 0), ("neutral", 1), ("contradiction", 2)],
}
PAIRS = [name for name in KINDS if name not in ("CoLA", "SST-2")]
TEXTS = ['a "dog', "it's late", "so it is , \u2028 is it ?", 'no " more " of this', "x", "the cat sat on the mat"]


def line(name, number, first, second, label):
    """One line of a file in its official format."""
    if name == "CoLA":
        return f"gj04\t{label}\t*\t{first}"
    values = dict.fromkeys(HEADERS[name], f"f{number}")
    columns = FORMATS[name].texts
    values |= {columns[0]: first, FORMATS[name].label: label}
    if len(columns) > 1:
        values[columns[1]] = second
    return "\t".join(values.values())


def rows(name, count, shift=0):
    """Made-up lines: (first text, second text, label, its number)."""
    labels = LABELS[name]
    for number in range(count):
        first, second = TEXTS[(number + shift) % 6], TEXTS[(number + shift + 1) % 6]
        yield first, second, *labels[(number + number // 6) % len(labels)]


def content(name, count, shift=0):
    lines = [] if name == "CoLA" else ["\t".join(HEADERS[name])]
    lines += [
        line(name, n, first, second, label) for n, (first, second, label, _) in enumerate(rows(name, count, shift))
    ]
    return "\n".join(lines) + "\n"


def parts_of(name):
    return ("dev_matched", "dev_mismatched") if name == "MNLI" else ("dev",)


def write(folder, name, train=12, test=8):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.tsv").write_text(content(name, train), encoding="utf-8")
    for number, part in enumerate(parts_of(name)):
        (folder / f"{part}.tsv").write_text(content(name, test, shift=2 + number), encoding="utf-8")
    return folder


def setting(folder, tokenizer=None, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    return Setting(replace(PRESET, **changes), tokenizer or bert.tokenizer(), folder)


def refused(name, data, tmp_path, kind=ValueError, **changes):
    with pytest.raises(kind) as caught:
        find_task(f"glue:{name}").prepare(str(data), setting(tmp_path / "out", **changes), 0)
    return str(caught.value)


# ---- files ----------------------------------------------------------------------------------------


def test_all_nine_tasks_are_there():
    assert set(DETAILED["glue"]) == {"CoLA", "SST-2", "MRPC", "STS-B", "RTE", "QNLI", "WNLI", "MNLI", "QQP"}
    assert find_task("glue:cola").name == "glue:CoLA"


def test_what_a_task_needs():
    glue = find_task("glue:MNLI")
    assert (glue.name, glue.metric, glue.higher_is_better) == ("glue:MNLI", "mean of matched and mismatched", True)
    assert (glue.auto, glue.shape, glue.presets) == ("AutoModelForSequenceClassification", "bert", FINETUNE)


@pytest.mark.parametrize("where", ["root", "folder"])
@pytest.mark.parametrize("name", KINDS)
def test_a_line_becomes_its_texts_and_its_label(name, where, tmp_path):
    write(tmp_path / "glue" / name, name)
    here, glue = setting(tmp_path / "out"), find_task(f"glue:{name}")
    about = glue.prepare(str(tmp_path / "glue" / (name if where == "folder" else "")), here, 0)
    assert about.startswith("12 examples of ")
    assert f"tested on {8 * len(parts_of(name))} others" in about
    examples = glue.examples(here, 0, 12)
    got = sorted((here.tokenizer.decode(x["input_ids"]), float(x["labels"])) for x in (examples[n] for n in range(12)))
    wanted = []
    for first, second, _, label in rows(name, 12):
        pair = (first, second) if name in PAIRS else (first,)
        ids = bert.tokenizer()(*pair, truncation=True, max_length=48)["input_ids"]
        wanted.append((bert.tokenizer().decode(ids), label))
    assert got == sorted(wanted)


@pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma.open), (".gz", gzip.open)])
def test_packed_files(suffix, opener, tmp_path):
    for part in ("train", "dev"):
        with opener(tmp_path / f"{part}.tsv{suffix}", "wt", encoding="utf-8") as file:
            file.write(content("RTE", 5))
    assert find_task("glue:RTE").prepare(str(tmp_path), setting(tmp_path / "out"), 0).startswith("5 examples")


def test_lines_with_carriage_returns_a_mark_at_the_start_and_no_end(tmp_path):
    write(tmp_path, "SST-2")
    text = content("SST-2", 12).rstrip("\n").replace("\n", "\r\n")
    (tmp_path / "train.tsv").write_bytes(b"\xef\xbb\xbf" + text.encode())  # the mark is no part of the first name
    assert find_task("glue:SST-2").prepare(str(tmp_path), setting(tmp_path / "out"), 0).startswith("12 examples")


def test_prepare_again_replaces_what_was_open(tmp_path):
    write(tmp_path / "a", "RTE")
    write(tmp_path / "b", "RTE", train=7)
    here, glue = setting(tmp_path / "out"), find_task("glue:RTE")
    glue.prepare(str(tmp_path / "a"), here, 0)
    old = glue.examples(here, 0, 12)
    before = [old[n]["input_ids"].tolist() for n in range(12)]
    glue.prepare(str(tmp_path / "b"), here, 0)
    assert [old[n]["input_ids"].tolist() for n in range(12)] == before
    assert len({int(n) for n in glue.examples(here, 0, 40).order}) == 7


def test_no_more_lines_than_a_run_sees_and_from_all_over(tmp_path):
    write(tmp_path, "SST-2", train=40, test=30)
    here, glue = setting(tmp_path / "out", evaluated=9), find_task("glue:SST-2")
    glue.prepare(str(tmp_path), here, 10)
    assert sorted({int(n) for n in glue.examples(here, 0, 100).order}) == list(range(10))
    assert len(glue.examples(here, 0, 100)) == 100
    model = Counter(2)
    list(glue.evaluate(model, here))
    assert model.rows == 9


# ---- files that are wrong -------------------------------------------------------------------------


def test_a_missing_column(tmp_path):
    write(tmp_path, "RTE")
    (tmp_path / "train.tsv").write_text(content("RTE", 3).replace("sentence2", "other", 1), encoding="utf-8")
    assert "train.tsv has no column 'sentence2'" in refused("RTE", tmp_path, tmp_path)


@pytest.mark.parametrize("part", ["train", "dev"])
def test_a_missing_file(part, tmp_path):
    write(tmp_path / "RTE", "RTE")
    (tmp_path / "RTE" / f"{part}.tsv").unlink()
    assert f"has no {part}.tsv" in refused("RTE", tmp_path, tmp_path, FileNotFoundError)


def test_mnli_needs_both_tests(tmp_path):
    write(tmp_path, "MNLI")
    (tmp_path / "dev_mismatched.tsv").unlink()
    assert "dev_mismatched.tsv" in refused("MNLI", tmp_path, tmp_path, FileNotFoundError)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "music").mkdir()
    assert "neither a folder CoLA nor" in refused("CoLA", tmp_path, tmp_path, FileNotFoundError)
    assert "there is no folder" in refused("CoLA", tmp_path / "none", tmp_path, FileNotFoundError)
    write(tmp_path / "RTE", "RTE")
    assert "is a file" in refused("RTE", tmp_path / "RTE" / "train.tsv", tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("CoLA", "2", "has 0, 1"),
        ("RTE", "maybe", "has entailment, not_entailment"),
        ("MNLI", "-", "has entailment, neutral, contradiction"),
        ("STS-B", "5.1", "numbers from 0 to 5"),
        ("STS-B", "nan", "numbers from 0 to 5"),
        ("STS-B", "", "numbers from 0 to 5"),
        ("QQP", "", "has 0, 1"),
    ],
)
def test_a_label_out_of_range(name, wrong, message, tmp_path):
    write(tmp_path, name)
    text = content(name, 4) + line(name, 4, "a", "b", wrong) + "\n"
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    error = refused(name, tmp_path, tmp_path)
    assert message in error
    assert f"line {5 if name == 'CoLA' else 6}: " in error


@pytest.mark.parametrize("name", [name for name in KINDS if name != "QQP"])
def test_lines_with_too_few_fields_are_counted_and_the_first_is_named(name, tmp_path):
    write(tmp_path, name)
    lines = content(name, 12).rstrip("\n").split("\n")
    at = (4, 9)
    for number in at:
        lines[number] = lines[number].rpartition("\t")[0]
    (tmp_path / "train.tsv").write_text("\n".join(lines), encoding="utf-8")
    error = refused(name, tmp_path, tmp_path)
    assert "2 of 12 lines" in error
    assert f"the first is line 5, with {lines[0].count(chr(9))}" in error


def test_a_tab_inside_a_text(tmp_path):
    write(tmp_path, "SST-2")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nso it\tis\t1\n", encoding="utf-8")
    assert "line 2, with 3" in refused("SST-2", tmp_path, tmp_path)


def test_qqp_has_a_few_lines_that_are_left_out_and_counted(tmp_path):
    write(tmp_path, "QQP", train=300)
    lines = content("QQP", 300).rstrip("\n").split("\n")
    lines[7], lines[90] = "3\t4\thow is", lines[90] + "\tmore"
    (tmp_path / "train.tsv").write_text("\n".join(lines), encoding="utf-8")
    about = find_task("glue:QQP").prepare(str(tmp_path), setting(tmp_path / "out"), 0)
    assert about.startswith("298 examples")
    assert about.endswith("; 2 malformed lines are left out")
    for number in range(10, 20):
        lines[number] = "x"
    (tmp_path / "train.tsv").write_text("\n".join(lines), encoding="utf-8")
    assert "12 of 300 lines" in refused("QQP", tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["CoLA", "RTE"])
@pytest.mark.parametrize("text", ["", "\n\n", "header"])
def test_an_empty_file(name, text, tmp_path):
    write(tmp_path, name)
    if text == "header":
        text = "" if name == "CoLA" else "\t".join(HEADERS[name]) + "\n"
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    error = refused(name, tmp_path, tmp_path)
    assert "train.tsv is empty" in error or "train.tsv has no column" in error


def test_another_length_to_test_at_is_refused(tmp_path):
    write(tmp_path, "RTE")
    assert "longest must be 1" in refused("RTE", tmp_path, tmp_path, longest=2)


# ---- the hub --------------------------------------------------------------------------------------


def test_the_hub_where_there_is_no_network(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match=r"nyu-mll/glue \(stsb\).*no network.*Name a folder with GLUE's own files"):
        find_task("glue:STS-B").prepare(None, setting(tmp_path), 0)


def test_the_hub(tmp_path, monkeypatch):
    from datasets import Dataset, DatasetDict

    def part(label):
        return Dataset.from_dict(
            {"premise": ["a b"] * 3, "hypothesis": ["c"] * 3, "label": [0, 2, label], "idx": [0, 1, 2]}
        )

    asked, parts = [], {name: part(1) for name in ("train", "validation_matched", "validation_mismatched")}
    monkeypatch.setattr("datasets.load_dataset", lambda *args: asked.append(args) or DatasetDict(parts))
    here = setting(tmp_path)
    about = find_task("glue:MNLI").prepare("some/glue", here, 0)
    assert (asked, about) == ([("some/glue", "mnli")], "3 examples of some/glue (mnli), tested on 6 others")
    got = find_task("glue:MNLI").examples(here, 0, 3)
    assert sorted(int(got[n]["labels"]) for n in range(3)) == [0, 1, 2]
    parts["train"] = part(-1)  # the hidden labels of `test`
    with pytest.raises(ValueError, match="train, row 2: the label is -1; glue:MNLI has 0 to 2"):
        find_task("glue:MNLI").prepare("some/glue", here, 0)
    parts["train"] = part(1).remove_columns("premise")
    with pytest.raises(ValueError, match="must have a part 'train' with 'premise', 'hypothesis', 'label'"):
        find_task("glue:MNLI").prepare("some/glue", here, 0)


# ---- batches --------------------------------------------------------------------------------------


def test_a_batch_is_as_long_as_its_longest_example(tmp_path):
    write(tmp_path / "glue", "RTE")
    here, glue = setting(tmp_path / "out"), find_task("glue:RTE")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    examples = [glue.examples(here, 0, 12)[n] for n in range(12)]
    batch = glue.collate(here, examples)
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    assert lengths.unique().numel() > 1
    assert batch["input_ids"].shape == (12, int(lengths.max()))
    assert torch.equal(batch["attention_mask"].sum(1), lengths)
    assert torch.equal(batch["attention_mask"], (torch.arange(lengths.max()) < lengths[:, None]).long())
    assert torch.equal(batch["input_ids"] == 0, batch["attention_mask"] == 0)
    for number, example in enumerate(examples):
        after_separator = (example["input_ids"] == 3).cumsum(0) - (example["input_ids"] == 3).long()
        assert batch["token_type_ids"][number, : lengths[number]].tolist() == after_separator.clamp(max=1).tolist()
    assert batch["labels"].tolist() == [int(example["labels"]) for example in examples]


def test_long_texts_are_cut(tmp_path):
    write(tmp_path / "glue", "RTE")
    here, glue = setting(tmp_path / "out", length=10), find_task("glue:RTE")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    examples = [glue.examples(here, 0, 12)[n]["input_ids"] for n in range(12)]
    assert max(map(len, examples)) == 10
    assert all(ids[-1] == 3 and (ids == 3).sum() == 2 for ids in examples)  # both texts and both separators are there


def test_the_order_is_that_of_the_seed_and_no_example_depends_on_how_many_there_are(tmp_path):
    write(tmp_path / "glue", "RTE")
    here, glue = setting(tmp_path / "out"), find_task("glue:RTE")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    some, more, other = (glue.examples(here, seed, count).order.tolist() for seed, count in ((1, 20), (1, 50), (2, 50)))
    assert more[:20] == some
    assert other[:20] != some
    assert sorted(more[:12]) == sorted(more[12:24]) == list(range(12))


def test_a_tokenizer_without_separators_gets_them(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    write(tmp_path / "glue", "RTE")
    made = Tokenizer(models.WordLevel({"<end>": 0, "?": 1, "x": 2, "late": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    glue = find_task("glue:RTE")
    with pytest.raises(ValueError, match="no end token"):
        glue.prepare(
            str(tmp_path / "glue"), setting(tmp_path / "out", PreTrainedTokenizerFast(tokenizer_object=made)), 0
        )
    here = setting(tmp_path / "out", PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>"))
    for _ in range(2):  # the second time with the tokenizer as it was saved
        glue.prepare(str(tmp_path / "glue"), here, 0)
        for number in range(12):
            example = glue.examples(here, 0, 12)[number]
            assert set(example) == {"input_ids", "labels"}
            assert example["input_ids"][0] == example["input_ids"][-1] == 0
            assert (example["input_ids"] == 0).sum() == 3
        here.tokenizer.save_pretrained(tmp_path / "saved")
        here = replace(here, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "saved"))
    assert here.tokenizer.pad_token == "<end>"


# ---- metrics --------------------------------------------------------------------------------------


def matthews(predicted, right):
    pairs = list(zip(predicted, right, strict=True))
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (1, 0), (0, 1)))
    return (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))


def f1(predicted, right):
    both = sum(a == b == 1 for a, b in zip(predicted, right, strict=True))
    return 2 * both / (sum(predicted) + sum(right))


def accuracy(predicted, right):
    return sum(a == b for a, b in zip(predicted, right, strict=True)) / len(predicted)


def pearson(predicted, right):
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (predicted, right))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def spearman(predicted, right):
    def ranks(values):  # ties share the mean of their places
        return [sum(y < x for y in values) + (sum(y == x for y in values) + 1) / 2 for x in values]

    return pearson(ranks(predicted), ranks(right))


PREDICTED, RIGHT = [1, 0, 1, 1, 0, 0, 1, 1, 0, 1], [1, 0, 0, 1, 1, 0, 1, 0, 0, 1]
SCORES = {
    "CoLA": (lambda s, r: {"matthews": matthews(s, r)}, "matthews"),
    "SST-2": (lambda s, r: {"accuracy": accuracy(s, r)}, "accuracy"),
    "MRPC": (lambda s, r: {"f1": f1(s, r), "accuracy": accuracy(s, r)}, "mean of F1 and accuracy"),
    "QQP": (lambda s, r: {"f1": f1(s, r), "accuracy": accuracy(s, r)}, "mean of F1 and accuracy"),
    "STS-B": (lambda s, r: {"pearson": pearson(s, r), "spearman": spearman(s, r)}, "mean of Pearson and Spearman"),
    "RTE": (lambda s, r: {"accuracy": accuracy(s, r)}, "accuracy"),
    "QNLI": (lambda s, r: {"accuracy": accuracy(s, r)}, "accuracy"),
    "WNLI": (lambda s, r: {"accuracy": accuracy(s, r)}, "accuracy"),
}


@pytest.mark.parametrize("name", SCORES)
def test_the_metrics_of_the_benchmark(name):
    oracle, ranked = SCORES[name]
    predicted = [0.3, 1.1, 4.8, 2.2, 2.2, 0.1] if name == "STS-B" else PREDICTED
    right = [0.0, 2.0, 5.0, 2.0, 1.5, 0.0] if name == "STS-B" else RIGHT
    wanted = {key: 100 * value for key, value in oracle(predicted, right).items()}
    if ranked not in wanted:
        wanted[ranked] = sum(wanted.values()) / 2
    assert KINDS[name].scores(predicted, right) == pytest.approx(wanted)
    assert find_task(f"glue:{name}").metric == ranked


@pytest.mark.parametrize(
    ("name", "predicted", "right", "wanted"),
    [
        ("MRPC", [0, 0], [0, 0], {"f1": 0.0, "accuracy": 100.0, "mean of F1 and accuracy": 50.0}),  # no positive at all
        ("CoLA", [1, 1, 1], [1, 0, 1], {"matthews": 0.0}),
        ("STS-B", [1.0, 2.0, 2.0], [0.0, 5.0, 5.0], dict.fromkeys(("pearson", "spearman"), 100.0)),
    ],
)
def test_metrics_of_few_values(name, predicted, right, wanted):
    found = KINDS[name].scores(predicted, right)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(("predicted", "right"), [([1.0, 1.0], [0.0, 5.0]), ([0.0, 1.0], [3.0, 3.0])])
def test_a_correlation_needs_two_values(predicted, right):
    with pytest.raises(Undefined, match="no correlation"):
        KINDS["STS-B"].scores(predicted, right)


class Counter(nn.Module):
    """A model whose output depends on the text alone: on the number of its tokens and on the first of them."""

    def __init__(self, labels):
        super().__init__()
        self.labels, self.rows, self.anything = labels, 0, nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask, token_type_ids):
        self.rows += len(input_ids)
        value = attention_mask.sum(1) + input_ids[:, 1]
        if self.labels == 1:
            return SimpleNamespace(logits=value[:, None].float())
        return SimpleNamespace(logits=torch.nn.functional.one_hot(value % self.labels, self.labels).float())


@pytest.mark.parametrize("name", KINDS)
def test_a_model_is_scored_on_every_line_with_its_own_label(name, tmp_path, monkeypatch):
    monkeypatch.setattr("locant.experiments.tasks.rows.TOKENS_AT_ONCE", 100)  # several batches, in another order
    write(tmp_path / "glue", name, test=23)
    here, glue = setting(tmp_path / "out"), find_task(f"glue:{name}")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    labels = glue.head(here)["num_labels"]
    assert labels == {"STS-B": 1, "MNLI": 3}.get(name, 2)
    assert (glue.head(here)["problem_type"] == "regression") == (name == "STS-B")
    (found,) = glue.evaluate(Counter(labels), here)
    scores = {}
    for number, part in enumerate(parts_of(name)):
        predicted, right = [], []
        for first, second, _, label in rows(name, 23, shift=2 + number):
            ids = here.tokenizer(*([first, second] if name in PAIRS else [first]), truncation=True, max_length=48)[
                "input_ids"
            ]
            value = len(ids) + ids[1]
            predicted.append(value if labels == 1 else value % labels)
            right.append(label)
        scores[part] = {"accuracy": accuracy(predicted, right)} if name == "MNLI" else SCORES[name][0](predicted, right)
    if name == "MNLI":
        matched, mismatched = (100 * scores[part]["accuracy"] for part in ("dev_matched", "dev_mismatched"))
        assert matched != mismatched
        wanted = {"matched": matched, "mismatched": mismatched, glue.metric: (matched + mismatched) / 2}
    else:
        wanted = {key: 100 * value for key, value in scores["dev"].items()}
        wanted.setdefault(glue.metric, sum(wanted.values()) / 2)
    assert found.length == 48
    assert not found.refused
    assert dict(found.values) == pytest.approx(wanted)
    # Two tests have no noise together.
    assert set(found.noise) == (set() if name == "MNLI" else set(wanted))
    if "accuracy" in found.noise:
        share = wanted["accuracy"] / 100
        assert found.noise["accuracy"] == pytest.approx(100 * math.sqrt(share * (1 - share) / 23), rel=0.2)


def test_a_constant_has_no_correlation(tmp_path):
    class Constant(Counter):
        def forward(self, input_ids, **rest):
            return SimpleNamespace(logits=torch.ones(len(input_ids), 1))

    write(tmp_path / "glue", "STS-B")
    here, glue = setting(tmp_path / "out"), find_task("glue:STS-B")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    (found,) = glue.evaluate(Constant(1), here)
    assert "no correlation" in found.refused
    assert not found.values


def test_outputs_that_are_no_numbers(tmp_path):
    class Broken(Counter):
        def forward(self, input_ids, **rest):
            return SimpleNamespace(logits=torch.full((len(input_ids), 2), math.nan))

    write(tmp_path / "glue", "RTE")
    here, glue = setting(tmp_path / "out"), find_task("glue:RTE")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    with pytest.raises(ValueError, match="NaN"):
        list(glue.evaluate(Broken(2), here))


# ---- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["native", "native+tisa:kernels=2", "tisa:kernels=2", "huang4:clip=8"])
@pytest.mark.parametrize("name", ["MNLI", "STS-B"])
def test_the_arms_of_a_model_in_a_folder(name, spec, tmp_path):
    model = bert.save(tmp_path / "model")
    write(tmp_path / "glue", name)
    here, glue = setting(tmp_path / "out"), find_task(f"glue:{name}")
    glue.prepare(str(tmp_path / "glue"), here, 0)
    arms.check(glue, here, model, spec)
    made = arms.build(glue, here, model, spec, seed=0)
    examples = glue.examples(here, 0, 4)
    batch = glue.collate(here, [examples[n] for n in range(4)])
    found = made(**batch)
    assert found.logits.shape == (4, 1 if name == "STS-B" else 3)
    logits = found.logits.double()
    wanted = (
        (logits[:, 0] - batch["labels"]).square().mean()
        if name == "STS-B"
        else -logits.log_softmax(-1)[range(4), batch["labels"]].mean()
    )
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    made.eval()
    (evaluation,) = glue.evaluate(made, here)
    assert glue.metric in evaluation.values or evaluation.refused


def test_a_shape_is_no_trained_model():
    with pytest.raises(ValueError, match="glue:CoLA starts from a trained model; name one, by its folder"):
        find_task("glue:CoLA").tokenizer(None, PRESET)
