"""Mutation testing: introduces one small fault at a time and checks that a test notices it.

    python -m reliability.mutants --changed        # mutants on the lines that differ from main; minutes
    python -m reliability.mutants --all            # every mutant in scope; hours, continues after an interruption
    python -m reliability.mutants --only 'src/locant/schemes/*'

mutmut's operators generate the mutants of the Python files (`generating.py`, `exclusions.py`). `listed.py` and
`listed_c.py` have faults that no tool makes. `runner.py` runs them: every mutant gets a forked process that has torch,
the library and the tests already imported, and runs the tests that reach the changed line.
"""
