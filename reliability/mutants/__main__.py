"""The command: chooses mutants, runs them and prints the score."""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from reliability.mutants import campaign, scores
from reliability.mutants.changes import base_revision, changed_lines
from reliability.mutants.generating import mutants_of_file
from reliability.mutants.listed import listed_mutants
from reliability.mutants.mapping import files_in_scope
from reliability.mutants.mutant import Mutant
from reliability.mutants.results import FILE, Results
from reliability.mutants.runner import preload

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 if a mutant was not noticed and has no reason."""
    options = _parser().parse_args(arguments)
    mutants = _chosen(options)
    if options.list:
        for mutant in mutants:
            print(mutant.key, mutant.line)
        return 0
    kept = Results(ROOT / FILE)
    if options.again:
        kept.forget(mutants)
    if any(campaign.unfinished(kept, mutant) for mutant in mutants):
        preload()
        campaign.run(ROOT, mutants, kept)
    if options.all:
        kept.rewrite({mutant.key for mutant in mutants})
    return scores.report(mutants, kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reliability.mutants", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--changed", action="store_true", help="mutants on lines that differ from main")
    which.add_argument("--all", action="store_true", help="every mutant; continues where it was interrupted")
    which.add_argument("--only", metavar="GLOB", help="the mutants of the files that match")
    which.add_argument("--listed", action="store_true", help="the faults of listed.py and listed_c.py alone")
    parser.add_argument("--since", metavar="REV", help="with --changed: the revision to compare with")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, drawn at random with seed 0")
    parser.add_argument("--again", action="store_true", help="run survivors again, e.g. after writing tests")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser


def _chosen(options: argparse.Namespace) -> list[Mutant]:
    since = (options.since or base_revision(ROOT)) if options.changed else ""
    found: list[Mutant] = []
    for path in [] if options.listed else files_in_scope(ROOT):
        if options.only and not fnmatch.fnmatch(path, options.only):
            continue
        lines = changed_lines(ROOT, path, since) if options.changed else None
        if lines is None or lines:
            found += mutants_of_file(ROOT, path, lines)
    for mutant in listed_mutants(ROOT):
        if options.only and not fnmatch.fnmatch(mutant.path, options.only):
            continue
        if not options.changed or changed_lines(ROOT, mutant.path, since):
            found.append(mutant)
    if options.sample and options.sample < len(found):
        found = random.Random(0).sample(found, options.sample)
    return found


if __name__ == "__main__":
    sys.exit(main())
