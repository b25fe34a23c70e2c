"""Puzzles: questions with the right answers, labels on the answers alone, and a model that learns one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from locant.experiments import arms
from locant.experiments.comparison import begin, where
from locant.experiments.presets import PUZZLE, find_preset
from locant.experiments.run import execute
from locant.experiments.tasks import find_task
from locant.experiments.tasks.algo import PUZZLES, TESTING, TRAINING, VOCABULARY, problem
from locant.experiments.tasks.task import Setting
from locant.runs.budget import Budget
from locant.runs.files import lines
from tests import bert

TOKENS = {number: token for token, number in VOCABULARY.items()}


def small(**changes):
    return replace(PUZZLE["quick"], **{"length": 5, "layers": 1, "heads": 2, "width": 16, "evaluated": 20} | changes)


def setting(name, folder, **changes):
    sizes = small(**changes)
    return Setting(sizes, find_task(f"algo:{name}").tokenizer(None, sizes), folder)


def number(digits):
    """Lowest digit first, by its places."""
    return sum(int(digit) * 10**place for place, digit in enumerate(digits))


def solved(name, question):
    """The answer to a question, by other means than the code makes it."""
    assert question[-1] == "="
    body = question[:-1]
    if name == "copy":
        return body
    if name == "reverse":
        return [body[-1 - at] for at in range(len(body))]
    if name == "sort":
        return [letter for letter in "abcdefghijklmnopqrstuvwxyz" for _ in range(body.count(letter))]
    if name == "addition":
        plus = body.index("+")
        total = number(body[:plus]) + number(body[plus + 1 :])
        return [str(total // 10**place % 10) for place in range(plus + 1)]
    if name == "parity":
        return [str(sum(map(int, body)) % 2)]
    at = body.index("key")
    return body[at + 1 : at + 6]


def size_of(name, question):
    if name == "addition":
        assert question.index("+") == len(question) - question.index("+") - 2  # both numbers have as many digits
        return question.index("+")
    return len(question) - 1 - (6 if name == "passkey" else 0)


@pytest.mark.parametrize("name", PUZZLES)
def test_every_answer_is_right(name):
    sizes = set()
    for at in range(200):
        question, answer = problem(name, TRAINING, 5, at, largest=7)
        assert answer == solved(name, question)
        sizes.add(size_of(name, question))
        assert len(question) + len(answer) == PUZZLES[name].tokens(size_of(name, question))
    assert sizes == set(range(1, 8))
    question, _ = problem(name, 1, 12, 0, size=12)
    assert size_of(name, question) == 12


def test_addition_by_hand():
    assert solved("addition", ["2", "9", "+", "1", "8", "="]) == ["3", "7", "1"]  # 92 + 81 = 173
    carries = {tuple(problem("addition", TRAINING, 0, at, size=2)[1])[2] for at in range(50)}
    assert carries == {"0", "1"}


def test_a_key_is_anywhere():
    places = {problem("passkey", TRAINING, 0, at, size=3)[0].index("key") for at in range(100)}
    assert places == {0, 1, 2, 3}


def test_parity_is_one_token_and_no_guess_is_better_than_chance():
    answers = [problem("parity", TRAINING, 0, at, largest=8)[1] for at in range(2000)]
    assert {len(answer) for answer in answers} == {1}
    assert abs(sum(answer == ["1"] for answer in answers) / 2000 - 0.5) < 0.05


# ---- examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUZZLES)
def test_only_the_answer_is_trained_on_and_padding_is_to_the_right(name, tmp_path):
    here, algo = setting(name, tmp_path), find_task(f"algo:{name}")
    examples = algo.examples(here, 0, 30)
    batch = algo.collate(here, [examples[at] for at in range(30)])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert batch["input_ids"].shape[1] == algo.positions(here.preset)  # 30 examples: one has the largest size
    lengths = set()
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        kept = int(mask.sum())
        lengths.add(kept)
        assert mask.tolist() == [1] * kept + [0] * (len(mask) - kept)
        tokens = here.tokenizer.convert_ids_to_tokens(ids.tolist())
        assert set(tokens[kept:]) <= {"<pad>"}
        assert "<pad>" not in tokens[:kept]
        at = tokens.index("=") + 1
        assert labels[:at].tolist() == [-100] * at
        assert labels[kept:].tolist() == [-100] * (len(labels) - kept)
        assert [TOKENS[label] for label in labels[at:kept].tolist()] == solved(name, tokens[:at])
        assert torch.equal(labels[at:kept], ids[at:kept])
    assert len(lengths) > 1


def test_an_example_depends_on_its_seed_and_number_alone(tmp_path):
    here, algo = setting("sort", tmp_path), find_task("algo:sort")

    def ids(seed, count, at):
        return algo.examples(here, seed, count)[at]["input_ids"].tolist()

    assert [ids(3, 10, at) for at in range(10)] == [ids(3, 99, at) for at in reversed(range(10))][::-1]
    assert [ids(3, 10, at) for at in range(10)] != [ids(4, 10, at) for at in range(10)]
    assert len({tuple(ids(3, 300, at)) for at in range(300)}) > 150
    with pytest.raises(IndexError):
        ids(3, 10, 10)


@pytest.mark.usefixtures("_any_length")
def test_tests_are_the_same_for_every_seed_and_no_training_example(tmp_path):
    inputs = []

    class Recording(Answering):
        def forward(self, input_ids):
            inputs.append(input_ids.tolist())
            return super().forward(input_ids)

    here, algo = setting("copy", tmp_path, length=12, longest=1), find_task("algo:copy")
    list(algo.evaluate(Recording(), here))
    list(algo.evaluate(Recording(), here))
    assert inputs[0] == inputs[1]
    trained = {
        tuple(algo.examples(here, seed, 100)[at]["input_ids"].tolist()) for seed in range(14) for at in range(100)
    }
    assert not trained & {tuple(row) for row in inputs[0]}


def test_the_tokenizer_has_one_token_for_a_symbol(tmp_path):
    from transformers import AutoTokenizer

    made = setting("copy", tmp_path).tokenizer
    made.save_pretrained(tmp_path)
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.get_vocab() == VOCABULARY
        assert tokenizer("b c key 4 =")["input_ids"] == [VOCABULARY[token] for token in ("b", "c", "key", "4", "=")]


# ---- errors ------------------------------------------------------------------------------


def test_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"reads no data; got some\.txt"):
        find_task("algo:copy").tokenizer("some.txt", small())
    with pytest.raises(ValueError, match="reads no data"):
        find_task("algo:copy").prepare("some.txt", setting("copy", tmp_path), 10)


def test_a_model_with_another_vocabulary_is_refused(tmp_path):
    here = replace(setting("copy", tmp_path), tokenizer=bert.tokenizer())
    with pytest.raises(ValueError, match="vocabulary of its own"):
        find_task("algo:copy").prepare(None, here, 10)


def test_a_test_without_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="evaluated must be at least 1"):
        find_task("algo:copy").prepare(None, setting("copy", tmp_path, evaluated=0), 10)


def test_a_model_that_sees_the_answer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bert is not causal, so it could read the tokens it must predict"):
        arms.check(find_task("algo:copy"), setting("copy", tmp_path), "bert", "native")
    arms.check(find_task("algo:copy"), setting("copy", tmp_path), "llama", "native")


def test_unknown_puzzles():
    with pytest.raises(ValueError, match=r"algo needs one of its tasks.*choose one of: copy, reverse, sort"):
        find_task("algo:chess")


# ---- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUZZLES)
def test_a_table_is_as_long_as_the_largest_training_example_and_no_longer(name, tmp_path):
    here, algo = setting(name, tmp_path, longest=2), find_task(f"algo:{name}")
    tokens = PUZZLES[name].tokens
    for spec in ("native", "learned"):
        arms.check(algo, here, "gpt2", spec)
        made = arms.build(algo, here, "gpt2", spec, seed=0).eval()
        first, second = algo.evaluate(made, here)
        assert (first.length, first.refused) == (5, "")
        assert (second.length, second.values) == (10, {})
        assert second.refused == f"its positions end at {tokens(5)}, and this has {tokens(10)} tokens"
    made = arms.build(algo, here, "gpt2", "alibi", seed=0).eval()
    assert [each.refused for each in algo.evaluate(made, here)] == ["", ""]


def test_a_table_that_is_too_short_to_train_with(tmp_path):
    here = setting("addition", tmp_path, length=10)  # 33 tokens
    with pytest.raises(ValueError, match=r"trained at 33 tokens: its positions end at 20.*or a preset with length=5$"):
        arms.check(find_task("algo:addition"), here, "gpt2", "learned:length=20")


def test_a_scheme_can_be_put_into_the_smallest_puzzle(tmp_path):
    here = setting("parity", tmp_path, length=4)  # 6 tokens, fewer than swap tries a model out with
    for spec in ("learned", "tisa", "native"):
        arms.check(find_task("algo:parity"), here, "gpt2", spec)
    with pytest.raises(ValueError, match="trained at 6 tokens: its positions end at 5"):
        arms.check(find_task("algo:parity"), here, "gpt2", "learned:length=5")


def test_sizes_double(tmp_path):
    here = setting("copy", tmp_path, longest=8)
    made = arms.build(find_task("algo:copy"), here, "gpt2", "nope", seed=0).eval()
    assert [each.length for each in find_task("algo:copy").evaluate(made, here)] == [5, 10, 20, 40]
    about = find_task("algo:copy").prepare(None, here, 10)
    assert about == "copy, generated on demand: sizes 1 to 5, tested at 5, 10, 20, 40"


# ---- scores ---------------------------------------------------------------------------------------


class Answering(nn.Module):
    """A model that predicts every next token except at some places: (row, place in the answer)."""

    def __init__(self, wrong=(), answer=5):
        super().__init__()
        self.anything, self.config = nn.Parameter(torch.zeros(1)), SimpleNamespace()
        self.wrong, self.answer, self.rows = set(wrong), answer, 0

    def forward(self, input_ids):
        right = input_ids.roll(-1, 1)
        for row in range(len(right)):
            for at in range(self.answer):
                if (self.rows + row, at) in self.wrong:
                    right[row, -1 - self.answer + at] += 1
        self.rows += len(right)
        return SimpleNamespace(logits=nn.functional.one_hot(right % len(VOCABULARY), len(VOCABULARY)).float())


@pytest.fixture
def _any_length(monkeypatch):
    monkeypatch.setattr("locant.experiments.tasks.algo.too_long", lambda model, length: "")


@pytest.mark.usefixtures("_any_length")
def test_exact_is_whole_answers_and_token_is_single_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("locant.experiments.tasks.algo.TOKENS_AT_ONCE", 50)  # several batches, the last one shorter
    here, algo = setting("copy", tmp_path, longest=1), find_task("algo:copy")
    (found,) = algo.evaluate(Answering(), here)
    assert dict(found.values) == {"exact": 1.0, "token": 1.0}
    (found,) = algo.evaluate(Answering([(0, 0), (0, 4), (7, 2), (19, 1)]), here)
    assert dict(found.values) == pytest.approx({"exact": 17 / 20, "token": 96 / 100})


def test_exact_is_what_greedy_decoding_gets_right(tmp_path):
    """With a model that was trained a little, so that some answers are right and some are not."""
    torch.manual_seed(0)
    sizes = {"length": 3, "width": 32, "evaluated": 60, "longest": 1}
    here, algo = setting("sort", tmp_path, **sizes), find_task("algo:sort")
    model = arms.build(algo, here, "gpt2", "native", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    examples = algo.examples(here, 0, 64 * 80)
    for step in range(80):
        batch = algo.collate(here, [examples[64 * step + at] for at in range(64)])
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    (found,) = algo.evaluate(model, here)
    right = 0
    for at in range(60):
        question, answer = problem("sort", TESTING, 3, at, size=3)
        ids = torch.tensor([[VOCABULARY[token] for token in question]])
        for _ in answer:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        right += [TOKENS[token] for token in ids[0, len(question) :].tolist()] == answer
    assert 0 < right < 60
    assert found.values["exact"] == pytest.approx(right / 60)


@pytest.mark.usefixtures("_any_length")
def test_outputs_that_are_no_numbers(tmp_path):
    class Broken(Answering):
        def forward(self, input_ids):
            return SimpleNamespace(logits=torch.full((*input_ids.shape, len(VOCABULARY)), torch.nan))

    with pytest.raises(ValueError, match="NaN"):
        list(find_task("algo:copy").evaluate(Broken(), setting("copy", tmp_path)))


# ---- a run ----------------------------------------------------------------------------------------


def test_a_run_learns_to_copy(tmp_path):
    """One run, from the command's parts: three letters at most, where a guess is right once in 26³."""
    text = "quick:length=3,layers=2,heads=2,width=64,batch=64,evaluated=100,longest=2,rate=0.005"
    assert find_preset(text, PUZZLE).length == 3
    comparison = begin(
        tmp_path / "out", task="algo:copy", schemes=["learned", "alibi"], data=None, model=None, seeds=[0],
        budget=Budget(steps=120), preset=text, calibrate=lambda *given: 0.0,
    )  # fmt: skip
    (run, _) = comparison.runs()
    here = where(tmp_path / "out", run)
    here.mkdir(parents=True)
    execute(run, here, tmp_path / "out" / "data")
    tests = [line for line in lines(here / "metrics.jsonl") if line["kind"] == "test"]
    assert [test["length"] for test in tests] == [3, 6]
    assert tests[0]["values"]["exact"] > 0.5
    assert tests[1]["refused"].startswith("its positions end at 7")
