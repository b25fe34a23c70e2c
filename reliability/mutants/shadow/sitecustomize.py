"""Runs when a Python process starts that a test of a mutant started: puts the mutant in place."""

import json
import os
from pathlib import Path

if os.environ.get("LOCANT_MUTANT"):
    from reliability.mutants.applying import shadow_file

    _root, _path, _text = json.loads(Path(os.environ["LOCANT_MUTANT"]).read_text())
    shadow_file(Path(_root), _path, _text)
