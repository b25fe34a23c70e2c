"""How much work the kernels do, by scheme, computed from their code: multiplications and bytes, and FlashAttention-2's.

A product is one matrix product of the size of q·kᵀ in a tile: BM · BN · D multiply-adds. FlashAttention-2 computes 2
forward and 5 backward. Ours compute 2 and 7: two kernels, one by queries and one by keys, each compute the logits and
the gradients of weights again. A table of vectors adds products in band tiles alone, where a band is twice as wide as a
tile and so counts 2 · width / D. In far tiles a term is one column, which is not a product.
"""

from __future__ import annotations

from dataclasses import dataclass

FLASH_ATTENTION_2 = (2, 5)
OURS = (2, 7)


@dataclass(frozen=True)
class Shape:
    """A causal call. `block` is the side of a tile."""

    length: int = 4096
    width: int = 64
    block: int = 64


@dataclass(frozen=True)
class Kind:
    """The widths of a scheme's tables of vectors relative to the head size, and its reach: None if it has none."""

    query: float = 0.0
    key: float = 0.0
    value: float = 0.0
    reach: int | None = None
    vector_gain: bool = False


SCHEMES = {
    "plain, bias, scalar gain, levels": Kind(),
    "shaw:clip=64": Kind(query=1, value=1, reach=64),
    "huang4:clip=64": Kind(query=1, key=1, reach=64),
    "inkling (side vectors of 16 in 64, extent 512)": Kind(query=0.25, reach=512),
    "huang3:clip=64": Kind(reach=64, vector_gain=True),
    "xl (no reach)": Kind(query=1, key=1),
}


def band_share(kind: Kind, shape: Shape) -> float:
    """The share of tiles with a visible pair, in causal attention, that have more than one column."""
    blocks = shape.length // shape.block
    if kind.reach is None:
        return 1.0
    # A tile n blocks to the left of the diagonal has offsets from −(n + 1)·block + 1 to −(n − 1)·block − 1.
    near = sum(blocks - n for n in range(blocks) if (n - 1) * shape.block + 1 < kind.reach)
    return near / (blocks * (blocks + 1) / 2)


def products(kind: Kind, shape: Shape) -> tuple[float, float]:
    """The products of an average tile: forward, and backward with gradients of all tables."""
    share = band_share(kind, shape)
    band = 2.0  # the width of a band in tiles
    forward, backward = float(OURS[0]), float(OURS[1])
    # forward: the term. Backward: the term in both kernels, the gradient of the vectors, that of the table.
    forward += share * band * (kind.query + kind.key + kind.value)
    backward += share * band * 4 * (kind.query + kind.key)
    backward += share * band * 3 * kind.value  # the values have no gradient through the table
    if kind.vector_gain:  # a product for each column in place of q·kᵀ: 2 · block − 1 of them
        columns = share * (2 * shape.block - 1) + (1 - share)
        forward += columns - 1
        backward += (2 + 1 + 1) * (columns - 1)  # the logits twice, dq and dk
    return forward, backward


def scratch_bytes(kind: Kind, shape: Shape) -> float:
    """Bytes that move through the cache in an average tile of the forward pass, written and read."""
    one = 4 * shape.block * (2 * shape.block) + 4 * shape.block * shape.block
    return band_share(kind, shape) * one * sum(x > 0 for x in (kind.query, kind.key, kind.value))


def memory_bytes(shape: Shape, itemsize: int = 2) -> int:
    """Bytes that one head must read and write in the forward pass: q, k, v, the output in float32, and two sums."""
    return shape.length * (3 * shape.width * itemsize + 4 * shape.width + 8)


def intensity(kind: Kind, shape: Shape) -> float:
    """Floating-point operations per byte of memory in the forward pass, causal."""
    operations = 2 * shape.width * shape.length * (shape.length + shape.block) / 2 * products(kind, shape)[0]
    return operations / memory_bytes(shape)


def table(shape: Shape | None = None) -> list[dict[str, str]]:
    """A row for each scheme."""
    shape = shape or Shape()
    rows = []
    for name, kind in SCHEMES.items():
        forward, backward = products(kind, shape)
        rows.append(
            {
                "scheme": name,
                "band tiles": f"{100 * band_share(kind, shape):.0f} %",
                "products forward": f"{forward:.1f}",
                "of FlashAttention-2": f"{forward / FLASH_ATTENTION_2[0]:.1f}",
                "products backward": f"{backward:.1f}",
                "of FlashAttention-2 ": f"{backward / FLASH_ATTENTION_2[1]:.1f}",
                "operations per byte": f"{intensity(kind, shape):.0f}",
                "KB through the cache per tile": f"{scratch_bytes(kind, shape) / 1024:.1f}",
            }
        )
    return rows


if __name__ == "__main__":
    found = table()
    print("| " + " | ".join(found[0]) + " |")
    print("|" + "---|" * len(found[0]))
    for row in found:
        print("| " + " | ".join(row.values()) + " |")
