"""Notebooks as pages: their cells as text and code, and a link to the notebook itself (a hook of mkdocs)."""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files


@event_priority(50)  # before repository.py, which reads the links of all pages
def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds a page for every notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        place = file.src_uri.removesuffix("ipynb") + "md"
        text = page(json.loads(file.content_string), Path(file.src_uri).name)
        files.append(File.generated(config, place, content=text))


def page(notebook: dict, name: str) -> str:
    """Returns the cells of a notebook as Markdown. The link to it comes after its first cell, which has the title."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    blocks.insert(1, f'<a href="{name}" download>Download this notebook</a>')
    return "\n\n".join(blocks)
