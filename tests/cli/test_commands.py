"""The command line as a whole: help, mistakes, and the start-up time."""

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import locant
from locant.cli import extras
from locant.cli.commands import COMMANDS
from locant.cli.parser import Parser
from tests.command_line import locant_command

ROOT = Path(__file__).parents[2]
WITH_A_SCHEME = {
    "schemes": ["hunag4"],
    "curve": ["alibi", "hunag4"],
    "check": ["hunag4"],
    "bench": ["hunag4:clip=8"],
    "swap": ["model", "rope/rope/hunag4", "-o", "out"],
    "compare": ["clm", "--schemes", "nope,huang4:clip=4,heads=own,native+hunag4", "-o", "out"],
    "train": ["clm", "hunag4", "-o", "out"],
    "finetune": ["clm", "native+hunag4", "--model", "model", "-o", "out"],
    "adapt": ["model", "hunag4", "--text", "text", "-o", "out"],
}

SLOW = ("torch", "transformers", "numpy", "datasets", "matplotlib", "pandas", "scipy", "locant.terms")

RUN_ALL = f"""
import json, sys
from tests.command_line import locant_command
for words in json.loads(sys.argv[1]):
    done = locant_command(*words)
    slow = [name for name in {SLOW} if name in sys.modules]
    print(json.dumps([words, done.exit_code, done.output, slow]))
"""


def test_help_and_mistakes_are_answered_without_torch():
    """Start-up time, as modules: importing torch takes seconds, and nothing here needs it."""
    lines = [["--help"], ["-h"], [], ["--version"], ["--wrong"], ["chekc"]]
    lines += [[name, "--help"] for name in COMMANDS]
    lines += [[name, *WITH_A_SCHEME.get(name, ["model"]), "--wrong"] for name in COMMANDS]
    lines += [[name, *words] for name, words in WITH_A_SCHEME.items()]
    lines += [["check", "tisa", "--heads", "5"], ["compare", "clm", "--schemes", "nope", "--budget", "soon"]]
    command = [sys.executable, "-c", RUN_ALL, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, *_ in answers] == lines
    for words, code, output, slow in answers:
        assert slow == [], f"locant {' '.join(words)} imports {slow}"
        assert code == (0 if {"--help", "-h", "--version"} & {*words} else 2), output
        if "--wrong" not in words and len(words) > 1 and words[1:] == WITH_A_SCHEME.get(words[0]):
            assert "did you mean 'huang4'" in output


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_of_its_function(name):
    parser = Parser("locant", "")
    COMMANDS[name].declare(parser)
    module, _, function = COMMANDS[name].function.partition(".")
    parameters = inspect.signature(getattr(import_module(f"locant.cli.{module}"), function)).parameters
    # What is imported is known by the time the function is called.
    assert {action.dest for action in parser._actions} - {"help", "imports"} == set(parameters)


def test_compare_has_at_most_ten_flags():
    parser = Parser("locant", "")
    COMMANDS["compare"].declare(parser)
    flags = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    assert len(flags) <= 10


def test_help_lists_the_commands_and_the_options_with_their_defaults():
    everything = locant_command("--help")
    assert everything.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in everything.stdout
    assert locant_command().stdout == everything.stdout
    assert locant_command().exit_code == 2
    text = " ".join(locant_command("compare", "-h").stdout.split())
    for part in ("--seeds N Runs of each scheme. Default: 3.", "-o FOLDER", "Required.", "--preset PRESET"):
        assert part in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chekc"], "unknown command 'chekc' (did you mean 'check'?); the commands are: schemes, curve"),
        (["--verison"], "unknown option --verison (did you mean '--version'?); see locant --help"),
        (["check", "tisa", "--widht=3"], "unknown option --widht (did you mean '--width'?); see locant check --help"),
        (["check", "tisa", "--head", "4"], "unknown option --head (did you mean '--heads'?)"),
        (["compare", "clm", "--sch", "nope", "-o", "x"], "unknown option --sch (did you mean '--schemes'?)"),
        (["schemes", "--len", "64"], "unknown option --len (did you mean '--length'?)"),
        (["check", "tisa", "rope"], "unexpected argument 'rope'"),
        (["check"], "the following arguments are required: SPEC"),
        (["check", "tisa", "--heads", "0"], "--heads: expected a whole number ≥ 1, got 0"),
        (["check", "tisa", "--seed", "x"], "--seed: expected a whole number, got 'x'"),
        (["swap", "model", "tisa"], "the following arguments are required: -o/--out"),
        (["adapt", "m", "tisa", "--text", "t", "-o", "o", "--train", "no"], "expected one of all, scheme; got 'no'"),
        (["compare", "clm", "--schemes", "tisa,,rope", "-o", "o"], "an empty place between two commas"),
    ],
)
def test_mistakes_are_answered_with_got_expected_and_remedy(words, message):
    done = locant_command(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stderr.startswith("error: ")
    assert done.stdout == ""


def test_options_may_stand_between_arguments():
    one = locant_command("schemes", "--heads", 4, "rope")
    assert (one.exit_code, one.output) == (0, locant_command("schemes", "rope").output)
    parser = Parser("locant curve", "")
    COMMANDS["curve"].declare(parser)
    found = parser.parse(["tisa", "-o", "x.png", "alibi", "--reach=3", "rope", "--seed", "-1"])
    assert (found["specs"], str(found["out"]), found["reach"], found["seed"]) == (
        ["tisa", "alibi", "rope"], "x.png", 3, -1,
    )  # fmt: skip


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "scipy" else object())
    done = locant_command("compare", "clm", "--schemes", "nope", "-o", "x")
    assert done.exit_code == 2
    assert "locant compare needs scipy; install it with: pip install 'locant[compare]'" in done.stderr


def test_the_command_is_installed():
    result = subprocess.run([sys.executable, "-m", "locant", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"locant {locant.__version__}, torch ")
