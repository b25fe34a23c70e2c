"""Copies of the kernel with one mistake each. A check that does not report its mistake proves nothing."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from locant.attention import build
from reliability.sanitize.checks import ADDRESS, MEMCHECK, MEMORY, SSE2, THREAD, Build, Check, Instructions, why_not
from reliability.sanitize.running import Outcome, call, compile_driver


@dataclass(frozen=True)
class Mistake:
    """A change of one place of fused.c, and what a check must print about it."""

    name: str
    old: str
    new: str
    check: Check
    reported: str


_UNINITIALISED = "  if (p) memset(p, 0, (size_t)(4 * n));\n"

MISTAKES = [
    Mistake(
        "one position read beyond the last",
        "  Span s = {pos[0], pos[0], pos[0], 1};\n",
        "  Span s = {pos[0], pos[0], pos[0], 1};\n  if (n % TILE && pos[n] == INT64_MIN) return s;\n",
        ADDRESS,
        "heap-buffer-overflow",
    ),
    Mistake(
        "tables not freed",
        "  free(table_memory);\n  free(tables);\n  return 0;",
        "  free(tables);\n  return 0;",
        ADDRESS,
        "detected memory leaks",
    ),
    Mistake(
        "a shift into the sign bit",
        "(uint32_t)((const uint16_t *)p)[at] << 16;",
        "(uint32_t)(((const uint16_t *)p)[at] << 16);",
        ADDRESS,
        "cannot be represented in type 'int'",
    ),
    Mistake(
        "sums not scaled to a larger logit", "      work->sum[i] *= shrink;\n", "", ADDRESS, "out[",
    ),
    Mistake(
        "a far tile taken one column early", "high <= 0)", "high <= 1)", ADDRESS, "kind of tile",
    ),
    Mistake(
        "table gradients of all threads in one place",
        "gradients_at(call, all, thread, slot);\n    move",
        "gradients_at(call, all, 0, tables_per_head(call) ? h : 0);\n    move",
        THREAD,
        "data race",
    ),
    Mistake(
        "memory shared by all callers",
        "  Tables one;\n",
        "  Tables one;\n  static Tables *volatile last;\n  last = &one;\n",  # volatile: -O3 would leave the write out
        THREAD,
        "data race",
    ),
    Mistake("memory not set to zero", _UNINITIALISED, "", MEMCHECK, "ninitialised"),
    Mistake("memory not set to zero", _UNINITIALISED, "", MEMORY, "use-of-uninitialized-value"),
]  # fmt: skip


def break_kernel(mistake: Mistake, folder: Path) -> Path:
    """A copy of fused.c with the mistake."""
    source = build.SOURCE.read_text(encoding="utf-8")
    if source.count(mistake.old) != 1:
        raise ValueError(
            f"{mistake.name}: fused.c has {source.count(mistake.old)} places {mistake.old!r}, expected 1; "
            f"write the mistake again for the kernel of today"
        )
    copy = folder / "fused.c"
    copy.write_text(source.replace(mistake.old, mistake.new), encoding="utf-8")
    return copy


def is_reported(
    mistake: Mistake, instructions: Instructions, calls: int = 30, flags: tuple[str, ...] = ("-Og",)
) -> bool:
    """Whether the check of a mistake reports it within some calls of a kernel that is built with `flags`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compile_driver(mistake.check, instructions, folder, flags, break_kernel(mistake, folder))
        done = call(mistake.check, program, 1, calls)
    return done.returncode != 0 and mistake.reported in done.stdout + done.stderr


def self_check(instructions: Instructions = SSE2) -> list[Outcome]:
    """An outcome for each mistake. A mistake that its check does not report is a finding."""
    outcomes = []
    for mistake in MISTAKES:
        name = f"self-check: {mistake.name} ({mistake.check.name})"
        reason = why_not(Build(mistake.check, instructions, 1))
        if reason is not None:
            outcomes.append(Outcome(name, not_run=reason))
        elif is_reported(mistake, instructions):
            outcomes.append(Outcome(name, good="reported"))
        else:
            outcomes.append(Outcome(name, findings=("the check did not report this mistake",)))
    return outcomes
