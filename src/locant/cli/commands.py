"""Every command of `locant`: its summary, its options, the function that runs it and the extra it needs.

The function that runs a command is in the file of its group: schemes.py, models.py, machine.py, training.py,
adapting.py, sharpening.py, exporting.py or papers.py. Its parameters have the names of the command's options and
arguments.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from locant.cli import values
from locant.cli.extras import COMPARE, HF, PLOT, SENTENCES, Extra
from locant.cli.parser import Parser

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""`locant.hf.pooling.MODES`, which cannot be read without torch."""

EXPORTS = ("auto", "original", "mpnet", "smollm3", "jinabert", "torch", "onnx")
"""`locant.exporting.exporting.TARGETS`, which cannot be read without torch."""


class Command(NamedTuple):
    """One command."""

    function: str  # file of this package and function in it
    summary: str
    declare: Callable[[Parser], None]
    extra: Extra | None = None
    forks: bool = False  # the fork server executes its runs


def _schemes(parser: Parser) -> None:
    parser.argument("name", "Describe one scheme or map and its options instead.", nargs="?", type=values.scheme_name)
    parser.option("--length", default=512, type=values.at_least(2), metavar="N", help="Length of the model, 2 or more.")
    parser.option("--layers", default=12, type=values.at_least(1), metavar="N", help="Layers of the model.")
    _size(parser, heads=12, width=768)
    _imports(parser)


def _curve(parser: Parser) -> None:
    _specs(parser, "tisa:kernels=5 alibi rope")
    _file(parser, "Picture file; the numbers are written beside it as csv.", default=Path("curve.png"))
    parser.option("--reach", default=64, type=values.at_least(1), metavar="N", help="Largest offset in the picture.")
    _size(parser, heads=12, width=768)
    _seed(parser, "the random parameters")
    _imports(parser)


def _check(parser: Parser) -> None:
    parser.argument("spec", "A scheme, such as tisa:kernels=5 or alibi+learned.", type=values.scheme)
    _size(parser, heads=4, width=32)
    _seed(parser, "the random parameters")
    _imports(parser)


def _inspect(parser: Parser) -> None:
    parser.argument("model", "Folder or hub name of a Hugging Face model, swapped or not. Or a position table: "
                    "FILE::KEY, with a .safetensors or .bin file or a folder of weights; ::KEY may be left out if a "
                    "file has one table.")  # fmt: skip
    parser.option("--text", type=Path, metavar="FILE", help="Text that the model reads. Default: Python's own manual.")
    _file(parser, "The page; its tables are written beside it as csv.", default=Path("report.html"))
    parser.option("--compare", metavar="MODEL", help="Another model or table, shown side by side.")
    parser.option("--explain", action="append", metavar="TEXT",
                  help="A text whose output is explained: which tokens, offsets and positions make it. Give it twice "
                  "for a model of sentences: why are the two texts similar?")  # fmt: skip
    parser.option("--heads", type=values.at_least(1), metavar="N",
                  help="For a table: attention heads of its model. With it, the page has the heads of the first layer "
                  "if the file has their weights.")  # fmt: skip
    parser.option(
        "--certainty",
        action="store_true",
        help="Add 95 %% intervals of the learned curves, by the text. A minute for a small model.",
    )
    _imports(parser)


def _bench(parser: Parser) -> None:
    _specs(parser, "tisa huang4:clip=64")
    parser.option("--lengths", default="256,512,1024,2048", type=values.whole_numbers, metavar="N,N,…",
                  help="Lengths to measure at, with commas between them.")  # fmt: skip
    _size(parser, heads=12, width=768)
    parser.option("--tokens", default=4096, type=values.at_least(1), metavar="N", help="Tokens in a batch.")
    parser.option("--repeats", default=5, type=values.at_least(3), metavar="N",
                  help="Measurements of each scheme, in turn with all others; 3 or more.")  # fmt: skip
    _file(parser, "Picture file; the numbers are written beside it as csv. Default: no picture.")
    _imports(parser)


def _doctor(parser: Parser) -> None:
    parser.argument("model", "Folder or hub name of a Hugging Face model: say what locant can do with it instead.",
                    nargs="?")  # fmt: skip
    _imports(parser)


def _swap(parser: Parser) -> None:
    parser.argument("model", "Folder or hub name of a Hugging Face model.")
    parser.argument("spec", "A scheme, such as tisa:kernels=5 or alibi+learned; native restores the model's own "
                    "positions after a swap with --keep-native.", type=values.cycle_or_native)  # fmt: skip
    _folder(parser, "Folder of the new model; it must be new or empty.")
    parser.option("--keep-native", action=BooleanOptionalAction, default=False,
                  help="Add the scheme to the model's own positions instead of replacing them.")  # fmt: skip
    parser.option("--impl", default="auto", metavar="NAME", help="Back end of the attention.")
    _imports(parser)


def _compare(parser: Parser) -> None:
    _task(parser)
    parser.option("--schemes", required=True, type=values.arms, metavar="SPEC,SPEC,…",
                  help="Schemes with commas between them. The first is the baseline.")  # fmt: skip
    _folder(parser, "Folder of the comparison. The same command continues a comparison that was stopped.")
    _data(parser)
    _model(parser)
    parser.option("--seeds", default=3, type=values.at_least(1), metavar="N", help="Runs of each scheme.")
    _training(parser)
    parser.option("--ray", metavar="ADDRESS", help="Address of a Ray cluster. Default: this machine.")
    _imports(parser)


def _train(parser: Parser) -> None:
    _task(parser)
    parser.argument("scheme", "A scheme, such as tisa:kernels=5, or native.", type=values.arm)
    _folder(parser, "Folder of the run, or of a comparison that it belongs to.")
    _data(parser)
    _model(parser)
    _seed(parser, "the weights and of the order of the data")
    _training(parser)
    _imports(parser)


def _finetune(parser: Parser) -> None:
    _task(parser)
    parser.argument("scheme", "native, a scheme in its place, or native+SCHEME beside it.", type=values.arm)
    parser.option("--model", required=True, metavar="MODEL", help="Folder or hub name of a trained model.")
    _folder(parser, "Folder of the run, or of a comparison that it belongs to.")
    _data(parser)
    _seed(parser, "the head and of the order of the data")
    _training(parser)
    _imports(parser)


def _adapt(parser: Parser) -> None:
    parser.argument("model", "Folder or hub name of a Hugging Face model.")
    parser.argument("spec", "A scheme, such as tisa:kernels=5.", type=values.cycle)
    parser.option("--text", required=True, type=Path, metavar="PATH",
                  help="Prose without labels to learn from: a file or a folder.")  # fmt: skip
    _folder(parser, "Folder of the new model. The same command continues an adaptation that was stopped.")
    parser.option("--budget", default="10min", type=values.budget, metavar="BUDGET",
                  help="Time or steps of training: 10min, 90s, 500steps. Time includes the fit; measuring comes on "
                  "top.")  # fmt: skip
    parser.option("--contrast", type=values.budget, metavar="BUDGET",
                  help="Time or steps of a second training, of encoders that make one vector per text: long documents "
                  "of the text must be found by spans removed from them. None by default.")  # fmt: skip
    parser.option("--train", default="all", type=values.one_of("all", "scheme"), metavar="WHICH",
                  help="all: every weight; scheme: the parameters of the scheme alone.")  # fmt: skip
    parser.option("--eval", dest="evaluate", action="append", metavar="SCORE",
                  help="stsb:FOLDER, sentences:FILE, longembed:FILE, clm or mlm; any number of times.")  # fmt: skip
    parser.option("--length", default=256, type=values.whole, metavar="N",
                  help="Tokens of the longest sequences; may be more than the model can read now.")  # fmt: skip
    parser.option("--pooling", type=values.one_of(*POOLING), metavar="MODE",
                  help=f"How vectors are made: {', '.join(POOLING)}. Default: as modules.json of the model says; mean "
                  "if it has none.")  # fmt: skip
    _seed(parser, "the order of the text and of the scheme")
    _trackers(parser)
    _imports(parser)


def _sharpen(parser: Parser) -> None:
    parser.argument("model", "Folder or hub name of a sentence-transformers model, swapped or not.")
    parser.option("--documents", required=True, type=Path, metavar="PATH",
                  help="The documents to be found: a folder of text files, or a file with a JSON object per line, "
                  '{"kind": "doc", "id": …, "text": …}. Queries in it are not read.')  # fmt: skip
    _folder(parser, "Folder of the sharpened model; it must be new or empty.")
    parser.option("--piece", type=values.at_least(1), metavar="N",
                  help="Tokens of the pieces in which documents are read. Default: 256, or as many as the model "
                  "reads.")  # fmt: skip
    parser.option("--length", default=4096, type=values.at_least(2), metavar="N",
                  help="Tokens that are read of a document.")  # fmt: skip
    parser.option("--most", default=500, type=values.at_least(2), metavar="N",
                  help="Documents that are read, evenly spaced over all of them.")  # fmt: skip
    parser.option("--shrink", default=0.5, type=float, metavar="X",
                  help="Strength of the map: near 0 most, 1 none.")  # fmt: skip
    parser.option("--eval", dest="evaluate", action="append", metavar="SCORE",
                  help="stsb:FOLDER or longembed:FILE, measured before and after; any number of times.")  # fmt: skip
    _imports(parser)


def _export(parser: Parser) -> None:
    parser.argument("model", "Folder of a swapped or adapted model.")
    _folder(parser, "Folder of the export; it must be new or empty.")
    parser.option("--to", default="auto", type=values.one_of(*EXPORTS), metavar="TARGET",
                  help=f"{', '.join(EXPORTS)}. auto: the first stock architecture that computes the same.")  # fmt: skip
    parser.option("--length", type=values.at_least(2), metavar="N",
                  help="Rows of a position table, or the longest input of a program. Default: all that the model "
                  "reads, at most 4,096 rows.")  # fmt: skip
    parser.option("--text", type=Path, metavar="PATH",
                  help="With --to original: prose on which a table of absolute positions is fitted to a scheme that is "
                  "not a table. An approximation; needs --length and --original.")  # fmt: skip
    parser.option("--original", metavar="MODEL", help="For this: the model before it was changed.")
    parser.option("--budget", default="5min", type=values.budget, metavar="BUDGET",
                  help="For this: time or steps of the fit, 5min or 200steps.")  # fmt: skip
    _imports(parser)


def _reproduce(parser: Parser) -> None:
    parser.argument("paper", "tisa, variance, huang or all.", type=values.one_of("tisa", "variance", "huang", "all"))
    parser.option("--claim", action="append", metavar="ID",
                  help="One claim, such as A3; may be given several times. Default: all of them.")  # fmt: skip
    parser.option("--preset", default="quick", type=values.one_of("quick", "small", "paper"), metavar="PRESET",
                  help="quick: minutes; small: hours on a laptop; paper: the paper's own sizes, for GPUs.")  # fmt: skip
    parser.option("--data", type=Path, metavar="FOLDER",
                  help="Folder with the data; a missing file is named with the place to get it.")  # fmt: skip
    _folder(parser, "Folder of the reproduction. The same command continues one that was stopped.")
    parser.option("--plan", action="store_true", help="Print the claims, their rules and the time, and run nothing.")
    parser.option("--long", action="store_true", help="Start even if the estimate is more than two days.")


def _imports(parser: Parser) -> None:
    parser.option("--import", dest="imports", action="append", type=values.own_code, metavar="CODE",
                  help="A file such as my_schemes.py, or a module, with schemes, tasks or models of your own; "
                  "may be given several times.")  # fmt: skip


def _specs(parser: Parser, examples: str) -> None:
    parser.argument("specs", f"Schemes, such as {examples}.", nargs="+", metavar="SPEC", type=values.scheme)


def _size(parser: Parser, *, heads: int, width: int) -> None:
    parser.option("--heads", default=heads, type=values.at_least(1), metavar="N", help="Attention heads of the model.")
    parser.option("--width", default=width, type=values.at_least(1), metavar="N",
                  help="Width of the model (d_model), a multiple of its heads.")  # fmt: skip
    parser.checks.append(_check_size)


def _check_size(given: Mapping[str, Any]) -> None:
    # `locant schemes NAME` describes one scheme; it builds none.
    if given.get("name") is None and given["width"] % given["heads"]:
        raise ValueError(f"--width must be a multiple of --heads; got {given['width']} and {given['heads']}")


def _seed(parser: Parser, what: str) -> None:
    parser.option("--seed", default=0, type=values.whole, metavar="N", help=f"Seed of {what}.")


def _file(parser: Parser, help: str, default: Path | None = None) -> None:
    parser.option("-o", "--out", type=Path, default=default, metavar="FILE", help=help)


def _folder(parser: Parser, help: str) -> None:
    parser.option("-o", "--out", type=Path, required=True, metavar="FOLDER", help=help)


def _task(parser: Parser) -> None:
    parser.argument("task", "clm, mlm, glue:CoLA …, squad, algo:copy …, or one of your own (--import).")


def _data(parser: Parser) -> None:
    parser.option("--data", metavar="DATA",
                  help="A text file or folder, a GLUE or SQuAD folder, or the name of a data set on the hub. Default: "
                       "the source of Python's standard library.")  # fmt: skip


def _model(parser: Parser) -> None:
    parser.option("--model", metavar="MODEL", help="gpt2, llama, bert or albert from scratch, a trained model, or "
                  "module:function of your own.")  # fmt: skip


def _training(parser: Parser) -> None:
    parser.option("--budget", type=values.budget, metavar="BUDGET",
                  help="Training of each run: 10min, 90s, 2h or 2000steps. Default: that of the preset.")  # fmt: skip
    parser.option("--preset", default="quick", metavar="PRESET",
                  help="quick, small or paper; with changes as in small:length=256,batch=8.")  # fmt: skip
    _trackers(parser)


def _trackers(parser: Parser) -> None:
    parser.option("--report-to", action="append", metavar="TRACKER",
                  help="Also send the losses to tensorboard, wandb or another tracker of transformers; may be given "
                  "several times.")  # fmt: skip


COMMANDS = {
    "schemes": Command("schemes.table", "Print all schemes with their parameters for a model of this size (by default "
                       "BERT-base) and six properties.", _schemes),
    "curve": Command("schemes.curve", "Draw schemes as functions of the offset, into a picture file and in the "
                     "terminal.", _curve, PLOT),
    "check": Command("schemes.check", "Test a scheme against the laws that every scheme obeys. The exit code is 1 if "
                     "it breaks one.", _check),
    "inspect": Command("models.inspect", "How does this model know where its tokens are? Write a page of figures and "
                       "print a short verdict.", _inspect, HF),
    "bench": Command("machine.bench", "Measure the time of schemes on this machine as a ratio to plain attention, "
                     "forward and with backward.", _bench),
    "doctor": Command("machine.doctor", "Print which back ends of attention work on this machine and why, and which "
                      "one is chosen when; or what can be done with a model.", _doctor),
    "swap": Command("models.swap", "Give a model another position scheme and save it with its tokenizer. "
                    "locant.load opens it.", _swap, HF),
    "compare": Command("training.compare", "Which position scheme is best for my data and my lengths? Train a model "
                       "with each, and write a table and a page.", _compare, COMPARE, forks=True),
    "train": Command("training.train", "Train one model from scratch. Also under torchrun or accelerate launch: "
                     "python -m locant train …", _train, COMPARE, forks=True),
    "finetune": Command("training.finetune", "Train one model from a trained one. Also under torchrun or accelerate "
                        "launch: python -m locant finetune …", _finetune, COMPARE, forks=True),
    "adapt": Command("adapting.adapt", "Give a trained model another position scheme that keeps its quality and reads "
                     "past its old length.", _adapt, COMPARE),
    "sharpen": Command("sharpening.sharpen", "Teach a sentence encoder in minutes to tell the documents of a "
                       "collection apart, without labels.", _sharpen, SENTENCES),
    "export": Command("exporting.export", "Write a swapped or adapted model as a stock architecture that computes the "
                      "same, or as ONNX, so that it opens without locant.", _export, HF),
    "reproduce": Command("papers.reproduce", "Test the claims of the papers behind locant, by rules that were fixed "
                         "beforehand, and write a page of verdicts.", _reproduce, COMPARE, forks=True),
}  # fmt: skip
