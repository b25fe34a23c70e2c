"""Texts, data sets and models of llama2.c: damaged, endless or compressed to nothing."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import struct
from pathlib import Path

from locant.adaptation import sample
from locant.experiments.tasks import squad
from locant.hf import llama2c
from locant.runs import glue_files, text_source
from reliability.hostile.case import Attack, Cases

CASES = Cases("text")
BLOCK = 2**23


def reading(name: str, make, read=text_source.read) -> Attack:
    """Makes a file and reads it."""

    def attack(folder: Path) -> object:
        make(folder / name)
        return read(folder / name)

    return attack


def bomb(compress):
    """A gigabyte of zeros in a few hundred kilobytes: one compressed block, many times."""
    return lambda path: path.write_bytes(compress(bytes(BLOCK)) * (2**30 // BLOCK))


def sparse(path: Path) -> None:
    """Ten terabytes, all of it a hole."""
    path.touch()
    os.truncate(path, 10**13)


for name, file, make, says in [
    ("a pipe", "a.txt", os.mkfifo, "not a regular file"),
    ("a device", "a.txt", lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ("a folder", "a.txt", os.mkdir, "not a regular file"),
    ("ten terabytes", "a.txt", sparse, "memory is free"),
    ("not UTF-8", "a.txt", lambda path: path.write_bytes(b"\xff" * 100), "not text in UTF-8"),
    ("half a character", "a.txt", lambda path: path.write_bytes("ä".encode()[:1]), "not text in UTF-8"),
    ("not xz", "a.xz", lambda path: path.write_bytes(b"x" * 100), "cannot be decompressed"),
    (
        "half an xz",
        "a.xz",
        lambda path: path.write_bytes(lzma.compress(os.urandom(10**5))[:5000]),
        "cannot be decompressed",
    ),
    ("not gzip", "a.gz", lambda path: path.write_bytes(b"x" * 100), "cannot be decompressed"),
    (
        "half a gzip",
        "a.gz",
        lambda path: path.write_bytes(gzip.compress(os.urandom(10**5))[:5000]),
        "cannot be decompressed",
    ),
    (
        "a gzip with wrong blocks",
        "a.gz",
        lambda path: path.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 100),
        "cannot be decompressed",
    ),
]:
    CASES.add(name, says, reading(file, make))
CASES.add("a bomb of gzip", "decompresses to more than", reading("a.gz", bomb(gzip.compress)))
CASES.add("a bomb of xz", "decompresses to more than", reading("a.xz", bomb(lzma.compress)))


def text(path: Path) -> object:
    """Reads a text as a comparison does."""
    return text_source.text(str(path))


def in_folder(make):
    """Makes a folder and what is in it."""

    def made(path: Path) -> None:
        path.mkdir()
        make(path)

    return made


CASES.add("a folder of pipes", "has no files", reading("a", in_folder(lambda path: os.mkfifo(path / "a.txt")), text))
CASES.add(
    "a folder of links to nowhere",
    "has no files",
    reading("a", in_folder(lambda path: (path / "a").symlink_to(path / "b")), text),
)
CASES.add("an empty text", "is empty", reading("a.txt", lambda path: path.touch(), text))
CASES.add("a text that is not there", "there is no file or folder", reading("a.txt", lambda path: None, text))
CASES.add("a pipe to adapt on", "there is no file or folder", reading("a.txt", os.mkfifo, sample.pieces))


def glue(content: str | bytes, task: str = "CoLA") -> Attack:
    """Reads a file of GLUE."""
    raw = content if isinstance(content, bytes) else content.encode()
    return reading("dev.tsv", lambda path: path.write_bytes(raw), lambda path: glue_files.read_file(task, path))


LINE = "gj04\t1\t\tA sentence.\n"
for name, attack, says in [
    ("an empty file", glue(""), "is empty"),
    ("a label of code", glue(LINE.replace("1", "__import__")), "line 1: the label is"),
    ("too few fields", glue("a\tb\n" * 3), "fields between tabs"),
    ("a line of a megabyte", glue("x" * 10**6), "fields between tabs"),
    ("other columns", glue("a\tb\n" * 2, "SST-2"), "has no column"),
    ("a score of NaN", glue("sentence1\tsentence2\tscore\na\tb\tnan\n", "STS-B"), "the score is"),
    ("a score of 1e999", glue("sentence1\tsentence2\tscore\na\tb\t1e999\n", "STS-B"), "the score is"),
    ("not UTF-8", glue(b"\xff\t1\t\t\xfe\n"), "UTF-8"),
]:
    CASES.add(f"GLUE, {name}", says, attack)


def questions(content) -> Attack:
    """Reads a file of SQuAD."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return reading(
        "a.json", lambda path: path.write_bytes(raw), lambda path: squad._questions(path, squad._articles(path))
    )


def article(**answer):
    """A file of SQuAD with one answer."""
    return {"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1", "question": "q", "answers": [answer]}]}]}]}


for name, attack, says in [
    ("nested deeply", questions(b"[" * 10**6), "nested too deeply"),
    ("data is an object", questions({"data": {}}), "no list 'data'"),
    ("a paragraph is a number", questions({"data": [{"paragraphs": [7]}]}), "format of SQuAD"),
    ("an article is a list", questions({"data": [[]]}), "format of SQuAD"),
    ("an answer starts at text", questions(article(text="c", answer_start="x")), "format of SQuAD"),
    ("half", questions(b'{"data": [{"para'), "is damaged"),
    (
        "an answer that starts at 1e999",
        questions(article(text="c", answer_start=math.inf)),
        "format of SQuAD",
    ),
]:
    CASES.add(f"SQuAD, {name}", says, attack)


def stories(*header: int, content: bytes = b"") -> Attack:
    """Reads a model of llama2.c."""
    return reading("a.bin", lambda path: path.write_bytes(struct.pack("7i", *header) + content), llama2c.load_model)


def words(content: bytes) -> Attack:
    """Reads a tokenizer of llama2.c."""
    return reading("a.bin", lambda path: path.write_bytes(content), llama2c.load_tokenizer)


BIG = 2**31 - 1
for name, attack, says in [
    ("a model of nothing", reading("a.bin", lambda path: path.touch(), llama2c.load_model), "not a model of llama2.c"),
    ("sizes of 2^31", stories(BIG - 1, BIG, BIG, 1, 1, BIG, BIG), "its header implies"),
    ("sizes that overflow 64 bits", stories(2**30, 2**30, 2**30, 2, 2, 2**30, 2**30), "its header implies"),
    ("no heads", stories(8, 8, 1, 0, 1, 8, 8), "its header is"),
    ("no key heads", stories(8, 8, 1, 2, 0, 8, 8), "its header is"),
    ("heads of an odd size", stories(6, 8, 1, 2, 2, 8, 8), "its header is"),
    ("negative sizes", stories(-8, 8, 1, 1, 1, 8, 8), "its header is"),
    ("a billion layers", stories(8, 8, 10**9, 2, 2, 8, 8), "its header implies"),
    ("a pipe", reading("a.bin", os.mkfifo, llama2c.load_model), "not a regular file"),
    ("words cut off", words(struct.pack("<ifi", 5, 0.0, 5) + b"ab"), "not a tokenizer"),
    ("a word of 2^31", words(struct.pack("<ifi", 5, 0.0, BIG)), "not a tokenizer"),
    ("a word of a negative length", words(struct.pack("<ifi", 5, 0.0, -1)), "not a tokenizer"),
    (
        "words that are not UTF-8",
        words(struct.pack("<i", 5) + (struct.pack("<fi", 0.0, 1) + b"\xff") * 300),
        "not text in UTF-8",
    ),
]:
    CASES.add(f"llama2.c, {name}", says, attack)
