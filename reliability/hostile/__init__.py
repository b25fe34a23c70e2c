"""Inputs that somebody could have made to harm a user. Each must be refused in words, at once and in little memory.

python -m reliability.hostile              all of them, with a table
python -m reliability.hostile --only plan  those with "plan" in their name
"""
