"""Random calls of `locant.attend`, compared with an independent reference. docs/reliability.md describes them.

python -m reliability.fuzz --cases 2000 --seed 0      # many cases
python -m reliability.fuzz --seed 0 --case 1234       # one of them again
"""

from reliability.fuzz.case import Case
from reliability.fuzz.check import Outcome, run
from reliability.fuzz.draw import draw

__all__ = ["Case", "Outcome", "draw", "run"]
