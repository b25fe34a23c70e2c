"""Folders of comparisons and adaptations that are damaged, and commands that get any of all this."""

from __future__ import annotations

import json
import os
from pathlib import Path

from locant.adaptation import output_folder
from locant.experiments import comparison, results
from locant.experiments.comparison import Comparison
from locant.experiments.presets import SCRATCH
from locant.experiments.work import Run, Work
from reliability.hostile.case import Attack, Cases, edit, model_folder, setting, without

CASES = Cases("run")
WORK = Work("clm", "gpt2", None, SCRATCH["quick"], 10)
RUN = Run(WORK, "nope", 0)


def compared(change) -> Attack:
    """Opens a comparison with changed settings."""

    def attack(folder: Path) -> object:
        content = Comparison(WORK, ("nope", "tisa"), (0, 1), "text").to_dict()
        (folder / comparison.FILE).write_text(json.dumps(content))
        edit(folder / comparison.FILE, change)
        return results.outcomes(folder, comparison.open_folder(folder))

    return attack


for name, change, says in [
    ("seeds that leave the folder", setting(["0/../../../evil"], "seeds"), "seeds must be a list of int"),
    ("seeds that are a number", setting(10**9, "seeds"), "seeds must be a list of int"),
    ("no schemes", setting([], "schemes"), "schemes must be a list"),
    ("schemes that are numbers", setting([5], "schemes"), "schemes must be a list of str"),
    ("no work", without("work"), "expected the entries work"),
    ("work that is a list", setting([], "work"), "expected the entries work"),
    ("steps as text", setting("10", "work", "steps"), "steps must be of the type"),
    ("steps true", setting(True, "work", "steps"), "steps must be of the type"),
    ("a preset of a number", setting(5, "work", "preset"), "expected the entries length"),
    ("a preset without a length", without("work", "preset", "length"), "expected the entries length"),
    ("a layer count of text", setting("x", "work", "preset", "layers"), "layers must be of the type"),
    ("another version", setting(1, "work", "new_setting"), "expected the entries task"),
]:
    CASES.add(name, says, compared(change))


def raw(content: bytes) -> Attack:
    """Opens a comparison with another comparison.json."""

    def attack(folder: Path) -> object:
        (folder / comparison.FILE).write_bytes(content)
        return comparison.open_folder(folder)

    return attack


for name, content, says in [
    ("comparison.json empty", b"", "is damaged"),
    ("comparison.json a list", b"[]", "expected a JSON object"),
    ("comparison.json nested deeply", b"[" * 10**6, "nested too deeply"),
    ("comparison.json not UTF-8", b"\xff", "is damaged"),
]:
    CASES.add(name, says, raw(content))


def measured(name: str, content: bytes) -> Attack:
    """Reads a run with one file."""

    def attack(folder: Path) -> object:
        here = comparison.where(folder, RUN)
        here.mkdir(parents=True)
        (here / name).write_bytes(content)
        return results.outcome(folder, RUN)

    return attack


for name, file, content, says in [
    ("metrics that are not JSON", "metrics.jsonl", b"{\n", "line 1 is damaged"),
    ("metrics of another kind", "metrics.jsonl", b'{"kind": "evil"}\n', "line 1 is damaged"),
    ("metrics without a kind", "metrics.jsonl", b"{}\n", "line 1 is damaged"),
    ("metrics that are numbers", "metrics.jsonl", b"5\n", "expected a JSON object"),
    ("a step as text", "metrics.jsonl", b'{"kind": "step", "step": "x", "seconds": 1}\n', "line 1 is damaged"),
    ("a test without values", "metrics.jsonl", b'{"kind": "test", "length": 8}\n', "line 1 is damaged"),
    ("metrics not UTF-8", "metrics.jsonl", b"\xff\n", "line 1 is damaged"),
    ("metrics nested deeply", "metrics.jsonl", b"[" * 10**6 + b"\n", "nested too deeply"),
    ("a reason that is a list", "FAILED", b"[]", "expected a JSON object"),
]:
    CASES.add(name, says, measured(file, content))


def pipe(folder: Path) -> object:
    """Reads a run whose metrics never end."""
    here = comparison.where(folder, RUN)
    here.mkdir(parents=True)
    os.mkfifo(here / "metrics.jsonl")
    return results.outcome(folder, RUN)


def adapted(content: bytes) -> Attack:
    """Continues an adaptation with another adapt.json."""

    def attack(folder: Path) -> object:
        (folder / "adapt.json").write_bytes(content)
        with output_folder.opened(folder, {"spec": "tisa"}) as opened:
            return opened

    return attack


CASES.add("metrics that are a pipe", "not a regular file", pipe)
CASES.add("adapt.json a list", "expected a JSON object", adapted(b"[]"))
CASES.add("adapt.json of another adaptation", "another adaptation", adapted(b'{"steps": 5, "spec": "evil"}'))
CASES.add("adapt.json half", "is damaged", adapted(b'{"steps": '))
CASES.add("adapt.json with steps of text", "steps", adapted(b'{"steps": "x", "spec": "tisa"}'))


def command(*words: str, prepare=lambda folder: None) -> Attack:
    """A command line. It must end with an error in one line; the runner gets it as an exception."""

    def attack(folder: Path) -> object:
        from tests.command_line import locant_command

        prepare(folder)
        done = locant_command(*(word.replace("HERE", str(folder)) for word in words))
        if done.exit_code in (0, None) or "Traceback" in done.output or "error: " not in done.stderr:
            raise AssertionError(f"exit code {done.exit_code}: {done.output[-300:]}")
        raise ValueError(done.stderr)

    return attack


def damaged(change):
    """A swapped model with a changed config."""
    return lambda folder: edit(model_folder(folder, "bert", "alibi") / "config.json", change)


BROKEN = damaged(without("locant", "locant", "stacks", 0, "layers", 0))
HUGE = damaged(setting(10**9, "locant", "num_hidden_layers"))
for name, attack, says in [
    (
        "inspect of a damaged plan",
        command("inspect", "HERE", "-o", "HERE/page.html", prepare=BROKEN),
        "has no encoder.layer.0",
    ),
    (
        "inspect of a billion layers",
        command("inspect", "HERE", "-o", "HERE/page.html", prepare=HUGE),
        "num_hidden_layers",
    ),
    (
        "inspect of an empty header",
        command(
            "inspect",
            "HERE",
            "-o",
            "HERE/page.html",
            prepare=lambda folder: (model_folder(folder) / "model.safetensors").write_bytes(b""),
        ),
        "not a whole safetensors file",
    ),
    (
        "inspect with a pipe as text",
        command(
            "inspect",
            "HERE",
            "--text",
            "HERE/pipe",
            prepare=lambda folder: (model_folder(folder), os.mkfifo(folder / "pipe")),
        ),
        "not a regular file",
    ),
    ("inspect of nothing", command("inspect", "HERE/none"), "there is no folder"),
    (
        "inspect of a config nested deeply",
        command(
            "inspect",
            "HERE",
            "-o",
            "HERE/page.html",
            prepare=lambda folder: (folder / "config.json").write_text("[" * 10**5),
        ),
        "nested too deeply",
    ),
    (
        "swap of a damaged plan",
        command("swap", "HERE", "tisa", "-o", "HERE/out", prepare=BROKEN),
        "has no encoder.layer.0",
    ),
    (
        "swap to a scheme too large",
        command("swap", "HERE", "tisa:kernels=1000000000000", "-o", "HERE/out", prepare=model_folder),
        "numbers",
    ),
    ("curve of a scheme too large", command("curve", "learned:length=1000000000000000", "-o", "HERE/a.png"), "numbers"),
    ("check of code", command("check", "__import__"), "unknown scheme"),
    ("a scheme of a million characters", command("check", "x" * 10**6), "characters"),
]:
    CASES.add(f"command, {name}", says, attack)
