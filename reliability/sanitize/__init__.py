"""The kernel under sanitizers: memory, undefined behaviour, leaks, uninitialised reads, data races, wrong values.

checks.py           the checks: compiler flags, what they need, what a finding is
running.py          builds the driver, tests/attention/fused_fuzz.c, and runs random calls
broken.py           copies of the kernel with one mistake each; a check must report them
python_threads.py   six Python threads that call `locant.attend` at once
openmp.c            OpenMP on pthreads, for ThreadSanitizer
"""
