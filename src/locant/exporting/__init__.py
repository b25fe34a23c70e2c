"""Exports of swapped models: stock architectures that everyone opens, and programs for torch and ONNX."""

from locant.exporting.exporting import Exported, export

__all__ = ["Exported", "export"]
