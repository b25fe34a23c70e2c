"""SQuAD: the answer in each window, the best spans, and the scores of the official script."""

import gzip
import itertools
import json
import lzma
import re
import string
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from locant.experiments import arms
from locant.experiments.presets import ANSWERS
from locant.experiments.tasks import find_task
from locant.experiments.tasks.rows import open_rows
from locant.experiments.tasks.squad import ANSWER, Span, Windows, score, spans
from locant.experiments.tasks.task import Setting
from tests import bert

PRESET = replace(ANSWERS["quick"], length=32, batch=4, longest=4, evaluated=0)
WORDS = ["the", "old", "mill", "stood", "by", "a", "river", "in", "north", "until", "1803", "its", "wheel", "broke"]


def paragraph(number, count=2):
    """A text of some 40 words, with questions about one or two of them."""
    words = [f"{WORDS[(number + at * 5) % len(WORDS)]}{at:02d}" for at in range(40)]  # none of them twice
    words[7] = f"Q{number}."
    context, questions = " ".join(words), []
    for which in range(count):
        at = (3 + 17 * which + number) % 38
        start = len(" ".join(words[:at])) + (1 if at else 0)
        text = " ".join(words[at : at + 1 + which])
        questions.append(
            {"id": f"{number}-{which}", "question": f"  what is it {which}?",
             "answers": [{"text": text, "answer_start": start}, {"text": "another", "answer_start": 0}]}
        )  # fmt: skip
    return {"context": context, "qas": questions}


def articles(first, count, each=2):
    return [
        {"title": f"t{n}", "paragraphs": [paragraph(n * each + at) for at in range(each)]}
        for n in range(first, first + count)
    ]


def content(found):
    return json.dumps({"version": "1.1", "data": found}, ensure_ascii=False)


def write(folder, train=None, test=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train-v1.1.json").write_text(content(articles(0, 3) if train is None else train), encoding="utf-8")
    (folder / "dev-v1.1.json").write_text(content(articles(3, 2) if test is None else test), encoding="utf-8")
    return folder


def setting(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    return Setting(replace(PRESET, **changes), bert.tokenizer(), folder)


def prepared(tmp_path, train=None, test=None, **changes):
    here = setting(tmp_path / "out", **changes)
    about = find_task("squad").prepare(str(write(tmp_path / "squad", train, test)), here, 0)
    return here, about


def questionsof(found):
    return [(p["context"], q) for article in found for p in article["paragraphs"] for q in p["qas"]]


def refused(data, tmp_path, kind=ValueError, **changes):
    with pytest.raises(kind) as caught:
        find_task("squad").prepare(None if data is None else str(data), setting(tmp_path / "out", **changes), 0)
    return str(caught.value)


def test_what_the_task_needs():
    squad = find_task("squad")
    assert (squad.name, squad.metric, squad.higher_is_better) == ("squad", "f1", True)
    assert (squad.auto, squad.shape, squad.presets) == ("AutoModelForQuestionAnswering", "bert", ANSWERS)


# ---- windows --------------------------------------------------------------------------------------


def letters(text):
    return re.sub(r"\s", "", text.lower())


def written(ids):
    return letters(bert.tokenizer().decode(ids)).replace("##", "")


@pytest.mark.parametrize("length", [16, 32, 64, 512])
def test_the_answer_of_a_window_read_back_is_the_answer(length):
    nowhere = 0
    for context, question in questionsof(articles(0, 5)):
        answer = question["answers"][0]
        some = {"question": [question["question"]], "context": [context]}
        some |= {"answer": [answer["text"]], "start": [answer["answer_start"]]}
        made = Windows(bert.tokenizer(), length).to_train(some)
        there = 0
        for ids, start, end in zip(made["input_ids"], made["start_positions"], made["end_positions"], strict=True):
            ids = ids.tolist()
            assert len(ids) <= length
            assert (ids[0], ids[-1], ids.count(3)) == (2, 3, 2)
            if (start, end) == (0, 0):
                nowhere += 1
                assert letters(answer["text"]) not in written(ids[ids.index(3) :])
                continue
            there += 1
            assert start > ids.index(3)  # in the paragraph, not in the question
            assert written(ids[start : end + 1]) == letters(answer["text"])
        # What is not longer than the overlap is in one window as a whole.
        assert there >= 1 or len(letters(answer["text"])) > length // 3
    assert (nowhere > 0) == (length < 512)


@pytest.mark.parametrize("length", [16, 32, 64])
def test_the_windows_of_a_question_overlap_and_cover_the_paragraph(length, tmp_path):
    here, _ = prepared(tmp_path, length=length, longest=1)
    for number, (context, _) in enumerate(questionsof(articles(3, 2))):
        rows = [row for row in open_rows(here.folder / f"test-{length}.arrow") if row["question"] == number]
        places = [[(s, e) for s, e in zip(row["starts"], row["ends"], strict=True) if s >= 0] for row in rows]
        assert places[0][0][0] == 0
        assert places[-1][-1][1] == len(context)
        for one, other in itertools.pairwise(places):
            assert len(set(one) & set(other)) == length // 3  # the stride: below 128 a third of the length
        whole = bert.tokenizer()(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert sorted({place for window in places for place in window}) == whole
        for row in rows:
            first = row["input_ids"].index(3)
            assert all(s == -1 for s in row["starts"][: first + 1])
            assert row["starts"][-1] == -1


def test_a_question_that_is_too_long_leaves_room_for_the_paragraph(tmp_path):
    found = articles(0, 1)
    found[0]["paragraphs"][0]["qas"][0]["question"] = "why " * 100
    here, _ = prepared(tmp_path, train=found, length=30, longest=1)
    rows = open_rows(here.folder / "train.arrow")["input_ids"]
    assert max(ids.index(3) for ids in rows) == 11  # [CLS], and a third of the length
    assert max(map(len, rows)) == 30


@pytest.mark.parametrize(("question", "kept"), [("why not it", "why not it"), ("why not its", "why not it")])
def test_a_question_of_a_third_of_the_length_is_whole(question, kept):
    """One token per letter: eight of 24."""
    some = {"question": [f"  {question} "], "context": ["a b"], "number": [7]}
    made = Windows(bert.tokenizer(), 24).to_test(some)
    ids = made["input_ids"][0].tolist()
    assert written(ids[1 : ids.index(3)]) == letters(kept)
    assert made["question"] == [7]


def test_a_batch_and_what_the_model_makes_of_it(tmp_path):
    here, _ = prepared(tmp_path)
    squad, model = find_task("squad"), bert.save(tmp_path / "model")
    examples = squad.examples(here, 0, 8)
    batch = squad.collate(here, [examples[n] for n in range(8)])
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)
    made = arms.build(squad, here, model, "native+tisa:kernels=2", seed=0).eval()
    found = made(**batch)
    each = [
        -logits.double().log_softmax(-1)[range(8), batch[name]].mean()
        for logits, name in ((found.start_logits, "start_positions"), (found.end_logits, "end_positions"))
    ]
    assert found.loss.item() == pytest.approx(sum(each).item() / 2, rel=1e-5)


def test_the_order_is_that_of_the_seed(tmp_path):
    here, _ = prepared(tmp_path)
    some, more, other = (find_task("squad").examples(here, s, n).order.tolist() for s, n in ((1, 20), (1, 90), (2, 20)))
    assert more[:20] == some != other


def test_prepare_twice(tmp_path):
    here, about = prepared(tmp_path)
    old = find_task("squad").examples(here, 0, 5)
    before = [old[n]["input_ids"].tolist() for n in range(5)]
    assert find_task("squad").prepare(str(tmp_path / "squad"), here, 0) == about
    assert [old[n]["input_ids"].tolist() for n in range(5)] == before


def test_no_more_questionsthan_asked_for(tmp_path):
    here = setting(tmp_path / "out", evaluated=3)
    about = find_task("squad").prepare(str(write(tmp_path / "squad")), here, 5)
    assert "tested on 3 others" in about
    assert "of 5 of them" in about
    assert len(open_rows(here.folder / "questions.arrow")) == 3


def test_the_answer_takes_in_no_neighbour_that_touches_it():
    """Punctuation follows and precedes an answer without a space: its token begins or ends where the answer does."""
    context, answer = "it was (built-up), by 1803.", "built"
    some = {"question": ["when?"], "context": [context], "answer": [answer], "start": [context.index(answer)]}
    made = Windows(bert.tokenizer(), 64).to_train(some)
    (ids,), (start,), (end,) = made["input_ids"], made["start_positions"], made["end_positions"]
    assert written(ids[start : end + 1].tolist()) == answer
    assert written(ids[start - 1 : end + 2].tolist()) == "(built-"  # they are tokens of their own


# ---- answers --------------------------------------------------------------------------------------


def brute_force(start, end, row):
    """Every pair of tokens, in plain Python."""
    inside = [at for at, place in enumerate(row["starts"]) if place >= 0]
    best_starts = sorted(inside, key=lambda at: -start[at])[:20]
    best_ends = sorted(inside, key=lambda at: -end[at])[:20]
    pairs = [(start[a] + end[b], a, b) for a in best_starts for b in best_ends if a <= b < a + ANSWER]
    return max(pairs, default=None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(6, 90), question=st.integers(1, 4))
def test_spans_are_the_best_ones(seed, length, question):
    generator = torch.Generator().manual_seed(seed)
    starts, ends = (torch.randn(2, length + 5, generator=generator) for _ in range(2))
    inside = [-1] * question + [3 * at for at in range(length - question - 1)] + [-1]
    rows = [{"starts": inside, "ends": [place + 2 if place >= 0 else -1 for place in inside]} for _ in range(2)]
    for number, span in enumerate(spans(starts, ends, rows)):
        wanted = brute_force(starts[number].tolist(), ends[number].tolist(), rows[number])
        if wanted is None:
            assert (span.start, span.end) == (0, 0)
            continue
        assert span.score == pytest.approx(wanted[0], abs=1e-5)
        assert (span.start, span.end) == (rows[number]["starts"][wanted[1]], rows[number]["ends"][wanted[2]])


def test_padding_is_no_answer():
    row = {"starts": [-1, 0, 5], "ends": [-1, 4, 9]}
    logits = torch.tensor([[9.0, 0.0, 1.0, 9.0, 9.0]])
    (span,) = spans(logits, logits, [row])
    assert (span.start, span.end, span.score) == (5, 9, 2.0)


class Oracle(nn.Module):
    """A model that finds every answer by its inputs. In a window without one, its logits are higher elsewhere."""

    def __init__(self, table, questions):
        super().__init__()
        self.anything, self.known, self.rows = nn.Parameter(torch.zeros(1)), {}, []
        for row in table:
            self.rows.append((row["question"], tuple(row["input_ids"])))
            first, last = questions[row["question"]]
            start = next((at for at, s in enumerate(row["starts"]) if s == first), None)
            end = next((at for at, e in enumerate(row["ends"]) if e == last), None)
            self.known[tuple(row["input_ids"])] = (start, end)

    def forward(self, input_ids, attention_mask, token_type_ids):
        logits = torch.zeros(2, *input_ids.shape)
        for number, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
            start, end = self.known[tuple(ids[mask.bool()].tolist())]
            if start is not None and end is not None:
                logits[0, number, start], logits[1, number, end] = 5.0, 5.0
            else:
                logits[:, number, 1] = 20.0  # in the question, where no answer is
        return SimpleNamespace(start_logits=logits[0], end_logits=logits[1])


def test_a_model_that_knows_the_answers_gets_them_all_at_every_length(tmp_path, monkeypatch):
    monkeypatch.setattr("locant.experiments.tasks.squad.too_long", lambda model, length: "no" if length > 64 else "")
    monkeypatch.setattr("locant.experiments.tasks.rows.TOKENS_AT_ONCE", 200)
    test = articles(3, 2)
    found = test[0]["paragraphs"][0]
    found["qas"][0]["answers"][0] = {"text": found["context"][10:45], "answer_start": 10}
    here, _ = prepared(tmp_path, test=test, length=32, longest=4)
    wanted = {}
    for number, (_, question) in enumerate(questionsof(test)):
        answer = question["answers"][0]
        wanted[number] = (answer["answer_start"], answer["answer_start"] + len(answer["text"]))
    rows = [row for length in (32, 64) for row in open_rows(here.folder / f"test-{length}.arrow")]
    found = list(find_task("squad").evaluate(Oracle(rows, wanted), here))
    assert [each.length for each in found] == [32, 64, 128]
    assert found[2].refused == "no"
    # At 32 tokens a long answer is in no window as a whole, and cannot be found.
    short = Oracle(open_rows(here.folder / "test-32.arrow"), wanted)
    whole = {question for question, ids in short.rows if None not in short.known[ids]}
    assert 0 < len(whole) < len(wanted)
    assert found[0].values["exact_match"] == pytest.approx(100 * len(whole) / len(wanted))
    assert dict(found[1].values) == {"exact_match": 100.0, "f1": 100.0}
    assert dict(found[1].noise) == {"exact_match": 0.0, "f1": 0.0}
    share = len(whole) / len(wanted)
    error = 100 * (share * (1 - share) / len(wanted)) ** 0.5
    assert found[0].noise["exact_match"] == pytest.approx(error, rel=0.2)
    shifted = {
        number: (start, end) for number, (start, end) in enumerate(wanted[(n + 1) % len(wanted)] for n in wanted)
    }
    assert list(find_task("squad").evaluate(Oracle(rows, shifted), here))[1].values["exact_match"] < 50


def test_a_model_with_64_positions_refuses_longer_inputs(tmp_path):
    here, _ = prepared(tmp_path, longest=4)
    squad, model = find_task("squad"), bert.save(tmp_path / "model", positions=64)
    native = list(squad.evaluate(arms.build(squad, here, model, "native", 0).eval(), here))
    assert [(each.length, each.refused) for each in native] == [(32, ""), (64, ""), (128, "its positions end at 64")]
    any_length = list(squad.evaluate(arms.build(squad, here, model, "tisa:kernels=2", 0).eval(), here))
    assert [set(each.values) for each in any_length] == [{"exact_match", "f1"}] * 3


# ---- the official script --------------------------------------------------------------------------


def plain(text):
    """Small letters, no punctuation, no articles, single spaces, letter by letter."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    words, word = [], ""
    for letter in kept + " ":
        if letter.isspace():
            words.append(word)
            word = ""
        else:
            word += letter
    return [word for word in words if word and word not in ("a", "an", "the")]


def official(predicted, answers):
    """Exact match and F1 of one question."""

    def f1(answer):
        one, other = plain(predicted), plain(answer)
        common = 0
        rest = list(other)
        for word in one:
            if word in rest:
                rest.remove(word)
                common += 1
        return (
            0.0
            if not common
            else 2 * (common / len(one)) * (common / len(other)) / (common / len(one) + common / len(other))
        )

    return max(plain(predicted) == plain(answer) for answer in answers), max(map(f1, answers))


CASES = [
    ("The Eiffel Tower", ["Eiffel tower."]),
    ("an  apple , a day", ["apple day", "pears"]),
    ("the U.S. Army", ["US army", "army"]),
    ("O'Brien-Smith", ["OBrienSmith"]),
    ("theory of a thing", ["theory thing of"]),
    ("dog dog cat", ["dog cat cat"]),
    ("nothing", ["something else"]),
    ("", ["word"]),
]


def scored(pairs):
    questions = [
        {"id": str(n), "context": predicted, "answers": answers} for n, (predicted, answers) in enumerate(pairs)
    ]
    return score(questions, [Span(0.0, 0, len(predicted)) for predicted, _ in pairs])


@pytest.mark.parametrize(("predicted", "answers"), CASES)
def test_the_scores_are_those_of_the_official_script(predicted, answers):
    exact, f1 = official(predicted, answers)
    assert scored([(predicted, answers)]) == pytest.approx({"exact_match": 100 * exact, "f1": 100 * f1}, abs=1e-4)


def test_the_score_is_the_mean_over_questions():
    each = [official(*case) for case in CASES]
    wanted = {"exact_match": sum(e for e, _ in each), "f1": sum(f for _, f in each)}
    assert scored(CASES) == pytest.approx({name: 100 * x / len(CASES) for name, x in wanted.items()}, abs=1e-4)


def test_the_mean_over_many_questions_is_as_exact_as_the_score_of_one():
    """Added up in single precision, F1 would be off by 2e-6 of its value: more than tells two schemes apart."""
    many = [("a dog cat", ["dog"]), ("mill", ["old mill by river"]), ("mill", ["mill"])] * 1500
    found = scored(many)
    assert found["f1"] == pytest.approx(100 * (2 / 3 + 2 / 5 + 1) / 3, rel=1e-7)
    assert found["exact_match"] == pytest.approx(100 / 3, rel=1e-12)


WORD = st.sampled_from(["the", "a", "An", "Cat", "cat.", "U.S.", "-", "1,803", "mill", "mill's", "é", "théa"])


@settings(max_examples=80, deadline=None)
@given(
    predicted=st.lists(WORD, max_size=6),
    answers=st.lists(st.lists(WORD, min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_random_answers(predicted, answers):
    one, others = " ".join(predicted), [" ".join(answer) for answer in answers]
    if not plain(one) and any(not plain(other) for other in others):
        return  # nothing is left of both: see the docstring of squad.py
    exact, f1 = official(one, others)
    assert scored([(one, others)]) == pytest.approx({"exact_match": 100 * exact, "f1": 100 * f1}, abs=1e-4)


# ---- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma.open), (".gz", gzip.open)])
def test_packed_files_and_others_beside_them(suffix, opener, tmp_path):
    for name, found in {"train-v1.1": articles(0, 3), "dev-v1.1": articles(3, 2), "dev-v2.0": []}.items():
        with opener(tmp_path / f"{name}.json{suffix}", "wt", encoding="utf-8") as file:
            file.write(content(found))
    about = find_task("squad").prepare(str(tmp_path), setting(tmp_path / "out"), 0)
    assert about.startswith("12 questions of ")
    assert "tested on 8 others" in about


@pytest.mark.parametrize(
    ("count", "each", "held_out"),
    [(3, 10, [19]), (2, 10, [19]), (25, 1, [19]), (20, 2, [38, 39]), (40, 1, [19, 39])],
)
def test_one_file_is_split_by_articles_or_paragraphs(count, each, held_out, tmp_path):
    path = tmp_path / "all.json"
    path.write_text(content(articles(0, count, each)), encoding="utf-8")
    here = setting(tmp_path / "out", length=400, longest=1)  # every question is one window
    about = find_task("squad").prepare(str(path), here, 0)
    held = open_rows(here.folder / "questions.arrow")
    assert [row["id"] for row in held] == [f"{number}-{which}" for number in held_out for which in (0, 1)]
    trained = [number for number in range(count * each) if number not in held_out]
    assert about.startswith(f"{2 * len(trained)} questions")
    texts = [written(ids) for ids in open_rows(here.folder / "train.arrow")["input_ids"]]
    assert [int(re.search(r"q(\d+)\.", text)[1]) for text in texts] == [number for number in trained for _ in (0, 1)]


def test_a_file_with_too_little_to_keep_some_for_testing(tmp_path):
    path = tmp_path / "few.json"
    path.write_text(content(articles(0, 2)), encoding="utf-8")
    assert "has 4 paragraphs; it needs at least 20" in refused(path, tmp_path)


def test_answers_that_are_not_at_their_index_are_left_out_and_counted(tmp_path):
    found = articles(0, 3)
    found[0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    found[1]["paragraphs"][1]["qas"][1]["answers"][0]["answer_start"] = -3
    _, about = prepared(tmp_path, train=found)
    assert about.startswith("10 questions")
    assert about.endswith("; 2 are left out: their answer is not at its answer_start")


def test_no_answer_at_all_is_at_its_index(tmp_path):
    found = articles(0, 1)
    for _, question in questionsof(found):
        question["answers"][0]["answer_start"] = 10_000
    assert "none of 4 answers" in refused(write(tmp_path / "squad", train=found), tmp_path)


def test_v2_is_refused(tmp_path):
    found = articles(3, 2)
    found[0]["paragraphs"][0]["qas"][0] |= {"answers": [], "is_impossible": True}
    assert "1 of 8 questions have no answer" in refused(write(tmp_path / "squad", test=found), tmp_path)


def test_a_question_twice(tmp_path):
    assert "has question 6-0 twice" in refused(
        write(tmp_path / "squad", test=[*articles(3, 1), *articles(3, 1)]), tmp_path
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged: Expecting value"),
        ('{"data": [', "is damaged: Expecting value"),
        ("[]", "expected a JSON object, got list"),
        ('{"version": 1}', "no list 'data'"),
        ('{"data": []}', "is empty"),
        ('{"data": [{"title": "x"}]}', "KeyError('paragraphs') at the first question"),
        ('{"data": [{"paragraphs": []}]}', "has no questions"),
        ('{"data": [{"paragraphs": [{"context": "x", "qas": [{"id": "1", "answers": []}]}]}]}', "KeyError('question')"),
    ],
)
def test_files_that_are_wrong(text, message, tmp_path):
    write(tmp_path / "squad")
    (tmp_path / "squad" / "dev-v1.1.json").write_text(text, encoding="utf-8")
    assert message in refused(tmp_path / "squad", tmp_path)


def test_files_that_are_not_there(tmp_path):
    write(tmp_path / "squad")
    assert "no file or folder" in refused(tmp_path / "none", tmp_path, FileNotFoundError)
    (tmp_path / "squad" / "dev-v1.1.json").rename(tmp_path / "squad" / "test-v1.1.json")
    assert "one file dev*.json" in refused(tmp_path / "squad", tmp_path, FileNotFoundError)
    for name in ("dev-one.json", "dev-two.json"):
        (tmp_path / "squad" / name).write_text("{}", encoding="utf-8")
    assert "dev-one.json, dev-two.json" in refused(tmp_path / "squad", tmp_path, FileNotFoundError)


def test_a_length_without_room(tmp_path):
    assert "at least 16" in refused(write(tmp_path / "squad"), tmp_path, length=15)
    assert "at least the trained 32 tokens; got 31" in refused(write(tmp_path / "squad"), tmp_path, also=31)


@pytest.mark.parametrize(("also", "lengths"), [(0, {32, 64}), (32, {32, 64}), (33, {32, 33, 64}), (90, {32, 64, 90})])
def test_another_length_to_test_at(also, lengths, tmp_path):
    here, _ = prepared(tmp_path, longest=2, also=also)
    assert {path.name for path in here.folder.glob("test-*")} == {f"test-{length}.arrow" for length in lengths}


def test_a_slow_tokenizer_does_not_know_the_places_of_its_tokens():
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        Windows(SimpleNamespace(is_fast=False), 32)


def test_the_hub(tmp_path, monkeypatch):
    from datasets import Dataset, DatasetDict

    def part(found):
        rows = [
            {"id": q["id"], "question": q["question"], "context": context, "title": "",
             "answers": {name: [answer[name] for answer in q["answers"]] for name in ("text", "answer_start")}}
            for context, q in questionsof(found)
        ]  # fmt: skip
        return Dataset.from_list(rows)

    parts = DatasetDict({"train": part(articles(0, 3)), "validation": part(articles(3, 2))})
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda name: asked.append(name) or parts)
    here = setting(tmp_path / "hub")
    assert find_task("squad").prepare("some/squad", here, 0).startswith("12 questions of some/squad")
    about = find_task("squad").prepare(None, here, 0)
    assert about.startswith("12 questions of rajpurkar/squad")
    assert asked == ["some/squad", "rajpurkar/squad"]
    other, _ = prepared(tmp_path)
    for name in ("train.arrow", "test-64.arrow", "questions.arrow"):
        assert open_rows(here.folder / name).to_list() == open_rows(other.folder / name).to_list()
    del parts["validation"]
    assert "must have a part 'validation'" in refused(None, tmp_path)

    def offline(*args):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    assert "no network" in refused("some/squad", tmp_path)
