"""The text of csv files: cells that a spreadsheet might execute."""

import csv
import io

import pytest

from locant.runs.csv_text import csv_lines


def test_columns_in_order_and_missing_values_empty():
    text = csv_lines(["b", "a"], [{"a": 1.5, "b": "x, y"}, {"b": None}])
    assert text == 'b,a\r\n"x, y",1.5\r\n,\r\n'


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n", "\0"])
def test_what_a_spreadsheet_executes_gets_an_apostrophe(first):
    text = csv_lines([f"{first}name"], [{f"{first}name": f"{first}1+cmd"}])
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows == [[f"'{first}name"], [f"'{first}1+cmd"]]


@pytest.mark.parametrize("cell", ["-1.5", "+2", "-1 -2 3e-5", -3.0, "a=b", ""])
def test_numbers_and_other_texts_stay(cell):
    (_, (found,)) = csv.reader(io.StringIO(csv_lines(["x"], [{"x": cell}]), newline=""))
    assert found == str(cell)
