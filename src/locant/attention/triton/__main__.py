"""`python -m locant.attention.triton --selftest`: checks the kernels on this machine's GPU, and times them.

Without a GPU, TRITON_INTERPRET=1 compares tiny calls in Triton's interpreter, and times nothing.
"""

from __future__ import annotations

import argparse
import sys

from locant.attention import triton


def main(arguments: list[str] | None = None) -> int:
    """0 if all comparisons passed."""
    parser = argparse.ArgumentParser(prog="python -m locant.attention.triton", description=__doc__)
    parser.add_argument("--selftest", action="store_true", help="compare with eager in float64, then time (on a GPU)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequences that are timed")
    options = parser.parse_args(arguments)
    if not options.selftest:
        parser.print_help()
        return 2
    missing = triton.missing()
    if missing is not None:
        print(missing)
        return 1
    from locant.attention.triton.selftest import selftest

    return selftest(options.length)


if __name__ == "__main__":
    sys.exit(main())
