"""What the commands `locant compare` and `locant inspect` do, as functions. The commands call them.

comparing.py    `locant.compare`
inspecting.py   `locant.inspect`
result.py       what both return: rows, figures and a page
"""
