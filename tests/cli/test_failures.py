"""Commands that fail say why in words, and leave no folder that blocks the next attempt."""

import json
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import locant
from locant.adaptation import adapting
from locant.cli import extras
from locant.cli.commands import COMMANDS
from locant.cli.parser import Parser
from locant.papers import reproduction
from tests import bert, words
from tests.command_line import locant_command

SMALL_DISK = 10_000
"""Bytes that a file may have: enough for a config, not for weights."""


@contextmanager
def full_disk():
    """Writing the weights of a model fails, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(words.text(40)))
    return bert.save(tmp_path / "model")


@pytest.fixture
def left(tmp_path, model):
    """The names in the folder of the test that were not there before."""
    before = set(tmp_path.iterdir())
    return lambda: sorted(path.name for path in set(tmp_path.iterdir()) - before)


def change(model, file, **changes):
    path = Path(model) / file
    weights = load_file(path)
    for name, value in changes.items():
        weights[name.replace("__", ".")][0] = value
    save_file(weights, path, metadata={"format": "pt"})


QUERY = "encoder__layer__0__attention__self__query__weight"


def test_every_command_that_writes_a_folder_or_file_is_tested_here():
    writing = set()
    for name, command in COMMANDS.items():
        parser = Parser(name, "")
        command.declare(parser)
        if "-o" in parser.format_help():
            writing.add(name)
    assert writing == {*FAILING, *DRAWING}


FAILING = {
    "swap": ("{model}", "alibi", "--impl", "none"),
    "adapt": ("{model}", "tisa", "--text", "{text}", "--budget", "2steps", "--length", "4"),
    "sharpen": ("{model}", "--documents", "{text}"),
    "inspect": ("{model}", "--text", "{text}", "--heads", "3"),
    "export": ("{model}", "--to", "smollm3"),
    "compare": ("clm", "--schemes", "tisa", "--data", "{text}.missing"),
    "train": ("clm", "tisa", "--data", "{text}.missing"),
    "finetune": ("clm", "tisa", "--model", "{model}", "--data", "{text}.missing"),
    "reproduce": ("tisa", "--data", "{text}"),
}
"""Command -> words with which it fails after its options were read."""
DRAWING = {
    "curve": ("tisa",),
    "bench": ("alibi", "--lengths", "8", "--tokens", "8", "--heads", "1", "--width", "8", "--repeats", "3"),
}
"""Commands that can only fail when they write."""


@pytest.mark.parametrize("name", FAILING)
def test_a_command_that_fails_leaves_nothing(name, model, left, tmp_path):
    given = [word.format(model=model, text=tmp_path / "text.txt") for word in FAILING[name]]
    done = locant_command(name, *given, "-o", tmp_path / "deep" / "out")
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert left() == []


@pytest.mark.parametrize("name", DRAWING)
def test_a_full_disk_while_a_picture_is_written(name, left, tmp_path):
    with full_disk():
        done = locant_command(name, *DRAWING[name], "-o", tmp_path / "deep" / "out.png")
    assert done.exit_code == 2, done.output
    assert left() == []


def test_a_full_disk_in_swap(model, left, tmp_path):
    with full_disk():
        done = locant_command("swap", model, "alibi", "-o", tmp_path / "new")
    assert done.exit_code == 2
    assert f"{tmp_path / 'new'} could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert left() == []
    assert locant_command("swap", model, "alibi", "-o", tmp_path / "new").exit_code == 0
    assert left() == ["new"]


def test_a_full_disk_in_adapt(model, left, tmp_path):
    given = ("adapt", model, "alibi", "--text", tmp_path / "text.txt", "--budget", "10steps", "--length", 16)
    with full_disk():
        done = locant_command(*given, "-o", tmp_path / "new")
    assert done.exit_code == 2, done.output
    assert f"{tmp_path / 'new' / 'checkpoint-10'} could not be written" in done.stderr
    assert left() == []


def test_a_full_disk_while_the_page_of_an_inspection_is_written(model, left, tmp_path, quick_inspection):
    with full_disk():
        done = locant_command("inspect", model, "--text", tmp_path / "text.txt", "-o", tmp_path / "deep" / "page.html")
    assert done.exit_code == 2, done.output
    assert left() == []


def test_python_callers_get_words_too(model, tmp_path):
    swapped = locant.swap(torch.nn.Module.float(locant.load(model)), locant.native(locant.load(model)))
    with full_disk(), pytest.raises(OSError, match=r"new could not be written: .*File too large"):
        swapped.save_pretrained(tmp_path / "new")


def test_native_restores_what_a_swap_kept(model, left, tmp_path):
    locant_command("swap", model, "tisa", "--keep-native", "-o", tmp_path / "kept")
    done = locant_command("swap", tmp_path / "kept", "native", "-o", tmp_path / "back")
    assert done.exit_code == 0, done.output
    assert "absolute: learned:length=64" in done.stdout
    assert "learned:length=64+tisa" in done.stdout  # before: the swap kept the table, and it still adds positions
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "bert"


def test_native_is_refused_in_words_where_there_is_nothing_to_restore(model, left, tmp_path):
    for given, expected in (
        ((model, "native"), "has its own positions already"),
        ((model, "native", "--keep-native"), "leave out one"),
    ):
        done = locant_command("swap", *given, "-o", tmp_path / "new")
        assert done.exit_code == 2
        assert expected in done.stderr
    locant_command("swap", model, "alibi", "-o", tmp_path / "swapped")
    done = locant_command("swap", tmp_path / "swapped", "native", "-o", tmp_path / "new")
    assert "load the original model" in done.stderr
    assert left() == ["swapped"]


@pytest.mark.parametrize("name", ["swap", "inspect", "adapt"])
def test_incomplete_weights_are_named(name, model, left, tmp_path):
    given = {"swap": ["alibi"], "inspect": [], "adapt": ["alibi", "--text", tmp_path / "text.txt"]}[name]
    path = tmp_path / "model" / "model.safetensors"
    whole = path.read_bytes()
    weights = {name: weight.clone() for name, weight in load_file(path).items()}  # not in the file
    path.write_bytes(whole[: len(whole) // 2])
    done = locant_command(name, model, *given, "-o", tmp_path / "new")
    assert done.exit_code == 2
    assert "model.safetensors is incomplete or damaged" in done.stderr
    path.unlink()
    torch.save(weights, tmp_path / "model" / "pytorch_model.bin")
    pickled = (tmp_path / "model" / "pytorch_model.bin").read_bytes()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickled[: len(pickled) // 2])
    done = locant_command(name, model, *given, "-o", tmp_path / "new")
    assert done.exit_code == 2
    assert f"{model} cannot be opened" in done.stderr
    assert left() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused_by_name(model, left, tmp_path, value):
    change(model, "model.safetensors", **{QUERY: value})
    done = locant_command("swap", model, "alibi", "-o", tmp_path / "new")
    assert done.exit_code == 2
    assert f"{QUERY.replace('__', '.')} has numbers that are not finite" in done.stderr
    assert left() == []
    loaded = locant.load(model)
    with pytest.raises(ValueError, match="not finite"):
        locant.swap(loaded, "alibi")
    assert str(locant.native(loaded)).startswith("absolute")


def test_a_place_that_cannot_be_written_is_found_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr("locant.cli.models.load", None)
    monkeypatch.setattr("locant.cli.adapting.load", None)
    for name, *given in (("inspect",), ("swap", "alibi"), ("adapt", "tisa", "--text", tmp_path / "text.txt")):
        done = locant_command(name, model, *given, "-o", "/proc/new")
        assert done.exit_code == 2, done.output
        assert "/proc/new" in done.stderr


def test_a_reproduction_that_is_refused_writes_nothing(left, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "LONGEST", 0.0)
    monkeypatch.setattr(reproduction, "check_data", lambda *_: None)
    done = locant_command("reproduce", "variance", "--preset", "quick", "-o", tmp_path / "new")
    assert done.exit_code == 2, done.output
    assert "this would take about" in done.stderr
    assert left() == []


def test_an_adaptation_that_has_a_checkpoint_stays(model, left, tmp_path, monkeypatch):
    given = ("adapt", model, "alibi", "--text", tmp_path / "text.txt", "--budget", "20steps", "--length", 16)
    monkeypatch.setattr(adapting.OutputFolder, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        locant_command(*given, "-o", tmp_path / "new")
    assert left() == ["new"]
    assert any((tmp_path / "new").glob("checkpoint-*"))


@pytest.mark.parametrize("given", [("inspect", "model"), ("swap", "model", "alibi"), ("doctor", "model")])
def test_without_transformers_the_extra_is_named(given, tmp_path, monkeypatch):
    found = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "transformers" else found(name))
    done = locant_command(*given, *(() if given[0] == "doctor" else ("-o", tmp_path / "new")))
    assert done.exit_code == 2
    assert "needs transformers; install it with: pip install 'locant[hf]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_model_gives_one_line_and_no_warning(tmp_path, recwarn):
    done = locant_command("swap", "no-such-model-anywhere", "alibi", "-o", tmp_path / "new")
    assert done.exit_code == 2
    assert "there is no folder no-such-model-anywhere, and no model of that name" in done.stderr
    assert not [each for each in recwarn if "sentence-transformers" in str(each.message)]
    with pytest.raises(OSError, match=r"^there is no folder no-such-model-anywhere, and no model"):
        locant.load("no-such-model-anywhere")


def test_code_that_is_missing_is_asked_for_by_the_option(tmp_path):
    done = locant_command("schemes", "--import", tmp_path / "nofile.py")
    assert f"there is no file {tmp_path / 'nofile.py'}" in done.stderr
    done = locant_command("compare", "no-such-task", "--schemes", "nope,alibi", "-o", tmp_path / "new")
    assert "a task of your own needs its file: --import FILE.py" in done.stderr
    assert "imports=" not in done.stderr


def test_a_string_is_no_model():
    with pytest.raises(TypeError, match=r"got str; open it first: locant.load\('folder'\)"):
        locant.swap("folder", "tisa")
