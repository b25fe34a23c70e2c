"""After `import locant`, transformers opens the folders of swapped models: AutoModel, pipeline, SentenceTransformer.

transformers takes seconds to import, and `import locant` must not wait for it. So the config is registered when
transformers loads the module of its registry, whoever imports it, and `locant.hf` when a folder is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTRY = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Registers the config of swapped models, now or when transformers is imported."""
    loaded = sys.modules.get(REGISTRY)
    if loaded is not None and hasattr(loaded, "AutoConfig"):
        _register(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(registry: Any) -> None:
    try:
        from locant.transformers_config import LocantConfig
    except ImportError:  # transformers 4, in which nothing of locant works; its users must be able to import locant
        return
    registry.AutoConfig.register(LocantConfig.model_type, LocantConfig, exist_ok=True)


class _Finder(MetaPathFinder):
    """Finds one module, as the other finders do, and calls `_register` after it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:  # fmt: skip
        if name != REGISTRY:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = next((spec for each in others if (spec := each.find_spec(name, path, target)) is not None), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register(module)

            setattr(found.loader, "exec_module", execute_and_register)  # noqa: B010 mypy forbids the assignment
        return found
