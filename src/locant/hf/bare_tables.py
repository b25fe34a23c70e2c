"""Position tables of weights whose model code is not there: which tensors they are, and what belongs to them.

A source is a path, or a path and the name of a tensor with `::` between them: `tables.safetensors::gpt2.wpe.weight`.

**Which tensors look like position tables.** All of these must hold:

- it is 2-D, with floating-point numbers and at least 8 rows: [positions, width];
- the last or the last but one part of its name, between dots, is a name that models use for such a table (`TABLE`):
  it contains position_embed, positional_embed, pos_embed, pos_emb, embed_pos, position_encod, positional_encod,
  pos_enc or sinusoid, or it is wpe or pe;
- no part of its name is about offsets or something else (`NOT_A_TABLE`): relative, rel_pos, rotary, rope, token_type,
  bias, norm.

Names with more than 300 characters, or with characters that cannot be printed, are left out altogether.

**Which query and key weights belong to a table.** Those of self-attention in layer 0 of the same model. The model of a
tensor is its name in front of the table or of the layers, without the words in `STRUCTURE`. Models are the same if
their names are, or if the one of the weights begins with the one of the table; an encoder is not a decoder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from transformers import CONFIG_MAPPING

from locant.hf import checkpoint
from locant.hf.stored_tensors import Stored, has_weights, is_weights, stored_tensors
from locant.notation import did_you_mean
from locant.runs.untrusted import shortened

SEPARATOR = "::"
"""Between a path and the name of a tensor in it."""
FEWEST = 8
"""Positions of the smallest table: fewer have no structure that could be told from chance."""
LISTED = 12
"""Names of tensors that an error lists."""
LONGEST_NAME, COMPARED = 300, 2000
"""Characters of a name that is considered, and names that a mistyped one is compared with: files may be hostile."""
TABLE = re.compile(
    r"position_embed|positional_embed|pos_emb|embed_pos|position_encod|positional_encod|pos_enc|sinusoid|^wpe$|^pe$",
    re.IGNORECASE,
)
NOT_A_TABLE = re.compile(r"relative|rel_pos|rotary|rope|token_type|bias|norm", re.IGNORECASE)
STRUCTURE = {"embeddings", "embedding", "encoder", "transformer", "model", "module"}
"""Parts of names that do not tell models apart."""
LAYER_0 = re.compile(
    r"^(?P<model>.*?)(?:^|\.)(?:layers?|h|blocks?|resblocks|attentions|albert_layer_groups\.0\.albert_layers)\.0\."
    r"(?P<inside>(?:.*\.)?)(?:(?P<name>query|key|q_proj|k_proj|q_lin|k_lin|q|k|c_attn|Wqkv|query_key_value)\.weight"
    r"|(?P<joined>in_proj_weight))$"
)
"""A query or key weight of layer 0, or one with both: the names that transformers and torch use."""
OTHER_ATTENTION = re.compile(r"encoder_attn|cross|EncDec|multihead_attn", re.IGNORECASE)
"""Attention of a decoder to an encoder."""
INTO = ("embedding_hidden_mapping_in", "embeddings_project", "project_in")
"""Linear layers between the embeddings and layer 0, for tables that are narrower than the model."""


@dataclass(frozen=True)
class BareTable:
    """A position table, and the weights of layer 0 of its model where they are stored beside it."""

    name: str
    table: Tensor  # [rows, width], as stored
    start: int  # the row of position 0; the rows above are padding
    attention: dict[str, Tensor] = field(default_factory=dict)  # weights by "query", "key", "c_attn", …
    into: Tensor | None = None  # [width of the model, width of the table]

    @property
    def positions(self) -> Tensor:
        """The rows that are positions, [positions, width]."""
        return self.table[self.start :]


def is_bare(source: str) -> bool:
    """Returns whether a source is a table or weights without model code, not the folder or hub name of a model.

    That is a source with `::`, a file of weights, or a folder with weights whose config.json is missing or has a
    model_type that transformers does not know.
    """
    path = Path(source)
    if not path.is_dir():
        return SEPARATOR in source or is_weights(path)
    if not has_weights(path):
        return False
    if not (path / checkpoint.CONFIG).is_file():
        return True
    kind = checkpoint.config_of(path).get("model_type")
    return not isinstance(kind, str) or kind not in CONFIG_MAPPING


def position_tables(source: str | Path) -> dict[str, Tensor]:
    """Returns the position tables of a file or folder of weights by name, [rows, width], in the dtype of the file.

    source    a .safetensors, .bin, .pt or .pth file, or a folder of weights; with `::KEY` behind it, the table of this
              name alone, whatever it is called.

    The first rows may be padding: see `first_position`. ValueError if there is no table, or one that cannot be used.
    """
    return {each.name: each.table for each in bare_tables(source)}


def bare_tables(source: str | Path, *, of_one_model: bool = False) -> list[BareTable]:
    """Returns what `position_tables` does, with the weights of layer 0 that belong to each table.

    of_one_model    refuse a file with several tables, unless the source names one: it may be a collection of tables of
                    several models. A folder is one model, so all its tables belong together.
    """
    path, key = split(source)
    stored = {name: each for name, each in stored_tensors(path).items() if _plain(name)}
    names = table_names(stored) if key is None else [_existing(path, key, stored)]
    if not names:
        raise ValueError(
            f"{path} has no tensor that looks like a position table (2-D floats, {FEWEST} rows or more, named "
            f"position_embeddings, wpe, embed_positions, …); name one as {path}{SEPARATOR}KEY. {_listed(stored)}"
        )
    if of_one_model and len(names) > 1 and not path.is_dir():
        raise ValueError(
            f"{path} has {len(names)} position tables; name one as {path}{SEPARATOR}KEY. "
            f"{_listed({name: stored[name] for name in names})}"
        )
    return [_bare_table(path, name, stored) for name in names]


def split(source: str | Path) -> tuple[Path, str | None]:
    """Returns the path of a source, and the name of the tensor behind `::`; None if it has none."""
    if Path(source).exists() or SEPARATOR not in str(source):
        return Path(source), None
    path, _, key = str(source).partition(SEPARATOR)
    return Path(path), key


def table_names(stored: dict[str, Stored]) -> list[str]:
    """Returns the names of the tensors that look like position tables, in the order of the alphabet."""
    return sorted(name for name, each in stored.items() if _named_like_a_table(name) and _shaped_like_a_table(each))


def first_position(table: Tensor) -> int:
    """Returns the row of position 0: 0, or the row after a row of zeros that is the first or second.

    Models that count from their padding token have such a row: RoBERTa, MPNet and their kin have it in row 1.
    """
    zero = [row for row in (0, 1) if row < table.shape[0] and not bool(table[row].any())]
    return zero[-1] + 1 if zero and bool(table.any()) else 0


def _plain(name: str) -> bool:
    return len(name) <= LONGEST_NAME and name.isprintable()


def _named_like_a_table(name: str) -> bool:
    return any(map(TABLE.search, name.split(".")[-2:])) and not NOT_A_TABLE.search(name)


def _shaped_like_a_table(each: Stored) -> bool:
    return each.floats and len(each.shape) == 2 and each.shape[0] >= FEWEST and each.shape[1] >= 1


def _existing(path: Path, key: str, stored: dict[str, Stored]) -> str:
    if key not in stored:
        raise ValueError(
            f"{path} has no tensor {shortened(key)}{did_you_mean(key, sorted(stored)[:COMPARED])}. "
            f"{_listed({name: stored[name] for name in table_names(stored)} or stored)}"
        )
    return key


def _listed(stored: dict[str, Stored]) -> str:
    """The first names of tensors with shapes, for an error; matrices come first."""
    names = sorted(stored, key=lambda name: (not _shaped_like_a_table(stored[name]), name))
    spelt = [f"{shortened(name)[1:-1]} ({stored[name].spelt})" for name in names[:LISTED]]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"It has {', '.join(spelt)}{more}"


def _bare_table(path: Path, name: str, stored: dict[str, Stored]) -> BareTable:
    each, where = stored[name], f"{path}{SEPARATOR}{shortened(name)[1:-1]}"
    if len(each.shape) != 2:
        raise ValueError(f"{where} has the shape {list(each.shape)}; a position table is 2-D, [positions, width]")
    if not each.floats:
        raise ValueError(f"{where} has the dtype {each.dtype}; expected floating point. Convert quantized tables first")
    if each.shape[1] < 1 or each.shape[0] < FEWEST:
        raise ValueError(f"{where} has {each.shape[0]} positions of width {each.shape[1]}; expected {FEWEST} or more")
    table = each.read(where)
    if not bool(table.float().isfinite().all()):
        raise ValueError(f"{where} contains NaN or infinity; a position table must be finite")
    start = first_position(table.float())
    if table.shape[0] - start < FEWEST:
        raise ValueError(
            f"{where} has {table.shape[0] - start} positions after {start} rows of padding; expected {FEWEST} or more"
        )
    attention, into = _layer_0(name, stored)
    return BareTable(name, table, start, attention, into)


def _layer_0(table: str, stored: dict[str, Stored]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns the query and key weights of the model of a table, and the layer in front of them if there is one."""
    parts = table.split(".")
    ours = _model(parts[: next((at for at, part in enumerate(parts) if TABLE.search(part)), len(parts) - 1)])
    attentions: dict[tuple[tuple[str, ...], str], dict[str, str]] = {}
    into = []
    for name, each in sorted(stored.items()):
        if not each.floats or len(each.shape) != 2 or each.too_large:
            continue
        *place, layer, _ = ["", *name.split(".")]
        found = LAYER_0.search(name)
        if found and not OTHER_ATTENTION.search(found["inside"]):
            its = _model(found["model"].split("."))
            attentions.setdefault((its, found["inside"]), {})[found["name"] or "Wqkv"] = name
        elif layer in INTO and _same_model(ours, _model(place)):
            into.append(name)
    models = {its for its, _ in attentions}
    chosen = ours if ours in models else min((its for its in models if _same_model(ours, its)), default=None)
    if chosen is None:
        return {}, None
    names = next(names for (its, _), names in attentions.items() if its == chosen)
    weights = {short: stored[name].read(name) for short, name in names.items()}
    return weights, stored[into[0]].read(into[0]) if into else None


def _model(parts: list[str]) -> tuple[str, ...]:
    return tuple(part for part in parts if part and part not in STRUCTURE)


def _same_model(table: tuple[str, ...], weights: tuple[str, ...]) -> bool:
    inside = bool(table) and weights[: len(table)] == table and ("decoder" in weights) == ("decoder" in table)
    return weights == table or inside
