"""The order of training rows: batches of similar lengths, every row once per epoch."""

import random

from locant.experiments.tasks.rows import GROUP, open_rows, training_rows, write_rows

BATCH = 4


def table(tmp_path, count):
    """Rows of lengths 1 to 60, in no order."""
    lengths = [1 + number % 60 for number in range(count)]
    random.Random(0).shuffle(lengths)
    path = tmp_path / "rows.arrow"
    write_rows(path, {"length": lengths}, lambda some: {"input_ids": [[7] * n for n in some["length"]]})
    return open_rows(path), lengths


def batches(rows):
    order = rows.order.tolist()
    return [order[at : at + BATCH] for at in range(0, len(order), BATCH)]


def test_every_epoch_has_every_row_once(tmp_path):
    made, _ = table(tmp_path, 240)
    order = training_rows(made, 480, BATCH, seed=1).order.tolist()
    assert sorted(order[:240]) == sorted(order[240:]) == list(range(240))
    assert order[:240] != order[240:]


def test_a_batch_that_spans_two_epochs_keeps_the_rows_of_both(tmp_path):
    made, _ = table(tmp_path, 101)  # 25 batches and a row
    order = training_rows(made, 202, BATCH, seed=1).order.tolist()
    assert sorted(order[:101]) == sorted(order[101:]) == list(range(101))


def test_little_of_a_batch_is_padding(tmp_path):
    made, lengths = table(tmp_path, 2400)
    found = batches(training_rows(made, 2400, BATCH, seed=1))
    padded = sum(BATCH * max(lengths[n] for n in batch) for batch in found)
    assert padded / sum(lengths) < 1.12  # in random order 1.6: the mean of the largest of four is four fifths


def test_batches_of_a_group_come_in_no_order_of_length(tmp_path):
    made, lengths = table(tmp_path, 2400)
    found = batches(training_rows(made, 2400, BATCH, seed=1))
    means = [sum(lengths[n] for n in batch) / BATCH for batch in found]
    groups = [means[at : at + GROUP] for at in range(0, len(means), GROUP)]
    assert not any(group in (sorted(group), sorted(group, reverse=True)) for group in groups[:20])


def test_a_row_depends_on_no_count(tmp_path):
    made, _ = table(tmp_path, 90)
    whole = training_rows(made, 400, BATCH, seed=3).order.tolist()
    for count in (1, 6, 33, 89, 91, 250):
        assert training_rows(made, count, BATCH, seed=3).order.tolist() == whole[:count]
    assert training_rows(made, 400, BATCH, seed=4).order.tolist() != whole


def test_fewer_rows_than_a_batch(tmp_path):
    made, _ = table(tmp_path, 3)
    order = training_rows(made, 12, BATCH, seed=0).order.tolist()
    assert [sorted(order[at : at + 3]) for at in range(0, 12, 3)] == [[0, 1, 2]] * 4
