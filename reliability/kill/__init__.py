"""Kills `locant compare` and `locant adapt` at random moments and checks that they end with the bits of whole runs.

    python -m reliability.kill [--kills 50] [--seed 0] [-o FOLDER]

subjects.py     the two commands, small enough to be killed often, and the results to compare
processes.py    a command in a session of its own: its processes, and how they are killed
campaign.py     the kills
scenarios.py    two commands at once, a full disk, a read-only folder, a clock that is set back
places.py       file systems that are full or read-only; clock.py: the clock
outcome.py      the result of a case, and the tables

It needs Linux. The full disk and the read-only folder need the right to mount.
"""
