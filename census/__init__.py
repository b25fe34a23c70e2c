"""Every text architecture of the installed transformers: built tiny, swapped and checked.

python -m census                 all of them; writes census/results/census.csv and docs/census.md
python -m census bert llama t5   some of them; prints their outcomes and writes nothing
python -m census --check         all of them; fails if one was right in census.csv and is not any more
"""
