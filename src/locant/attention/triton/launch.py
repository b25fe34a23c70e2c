"""Runs the kernels on a `Call`: makes their arguments from tensors, and sums what they leave in parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locant.attention.fused_call import TABLES, Call
from locant.attention.triton import kernels
from locant.attention.triton.blocks import INTERPRETED, Blocks, choose_blocks, fastest, smaller
from locant.attention.triton.kernels.records import Factors, Form, Mask, Positions, Rows, Sizes, Table

PROGRAMS = 1024
"""Most programs that have scratch memory or sum gradients: enough for any GPU, and independent of it."""
BUFFER_BYTES = 2**28
"""Most memory for gradients of tables in parts; one part per head is always allowed."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_fitting: dict[Hashable, Blocks] = {}
"""Sizes that fit on a device where those of the table do not, by device, kernel, form and gradients."""


class Launch:
    """A call in the form that the kernels read."""

    def __init__(self, call: Call, blocks: Blocks | None = None) -> None:
        """`blocks` are the sizes for all kernels; without them each has its own, of the table."""
        self.call, self.consecutive, self.given_blocks = call, call.consecutive, blocks
        self.interpreted = not isinstance(kernels.forward, triton.runtime.JITFunction)
        self.batch, self.heads, self.lq, _ = call.q.shape
        self.kv_heads, self.lk = call.k.shape[1], call.k.shape[2]
        self.fitting: dict[str, Blocks] = {}
        self.tables = self._tables()
        self.columns = next((x.shape[1] for x in self.tables.values()), 1)

    def _tables(self) -> dict[str, Tensor]:
        """The tables that are used. Those in matrix products have the dtype of the operands."""
        operands = torch.float32 if self.call.q.dtype == torch.float16 else self.call.q.dtype
        return {
            name: x.to(operands if name in ("query", "key", "value") else torch.float32).contiguous()
            for name in TABLES
            if (x := getattr(self.call, name)) is not None
        }

    def blocks(self, kernel: str) -> Blocks:
        """The sizes of the tiles of a kernel."""
        if self.given_blocks is not None:
            return self.given_blocks
        if kernel in self.fitting:
            return self.fitting[kernel]
        if self.interpreted:
            return INTERPRETED
        call, kind = self.call, "numbers"
        if not self.consecutive or call.mask is not None or call.dropout:
            kind = "pairs"
        if any(x.ndim == 3 for x in self.tables.values()):
            kind = "vectors"
        major, minor = torch.cuda.get_device_capability(call.q.device)
        vectors = (x.shape[2] for name in ("query", "key") if (x := self.tables.get(name)) is not None)
        width = max(call.q.shape[3], call.v.shape[3], *vectors)
        return choose_blocks(width, kind, call.q.element_size(), 10 * major + minor, kernel)

    def form(self, kernel: str) -> Form:
        """What a kernel is compiled for, without gradients of tables."""
        call, blocks = self.call, self.blocks(kernel)
        d, dv = call.q.shape[3], call.v.shape[3]
        p = 1 if call.query is None else call.query.shape[2]
        t = 1 if call.key is None else call.key.shape[2]
        half = call.q.dtype == torch.float16
        dtype = DTYPES[call.q.dtype]
        return Form(
            block_m=blocks.queries,
            block_n=blocks.keys,
            band=triton.next_power_of_2(blocks.queries + blocks.keys - 1),
            width=d,
            width_block=_padded(d),
            value_width=dv,
            value_block=_padded(dv),
            query_width=p,
            query_block=_padded(p),
            key_width=t,
            key_block=_padded(t),
            dtype=dtype,
            table_dtype=tl.float32 if half else dtype,
            table_precision="tf32" if half else "ieee",
            interpreted=self.interpreted,
            consecutive=self.consecutive,
            far=not self.consecutive or self.columns < self.lq + self.lk - 1,
            lowest=call.lowest is not None,
            highest=call.highest is not None,
            mask=call.mask is not None,
            guarded=call.mask is not None or not (self.consecutive or call.lowest is call.highest is None),
            bias=call.bias is not None,
            gain=0 if call.gain is None else call.gain.ndim - 1,
            query=call.query is not None,
            key=call.key is not None,
            value=call.value is not None,
            raw_q=call.raw_q is not None,
            raw_k=call.raw_k is not None,
            query_level=call.query_level is not None,
            key_level=call.key_level is not None,
            level=call.level is not None,
            temperature=call.temperature is not None,
            softcap=call.softcap is not None,
            sinks=call.sinks is not None,
            dropout=call.dropout > 0,
            again=blocks.again,
            scratch=any(x is not None for x in (call.query, call.key, call.value)),
        )

    def _fit(self, kernel: str, run: Callable[[], None], gradients: tuple[str, ...] = ()) -> None:
        """Runs a kernel: with smaller tiles if the device has too little shared memory for those of the table.

        Triton knows what a kernel needs once it is compiled. The sizes that fit are remembered, so the same call takes
        the same sizes, whatever was called before.
        """
        key = (self.call.q.device, kernel, self.form(kernel), gradients)
        if key in _fitting:
            self.fitting[kernel] = _fitting[key]
        while True:
            try:
                return run()
            except triton.runtime.errors.OutOfResources:  # noqa: PERF203 - a few times in a process
                found = smaller(self.blocks(kernel))
                if found is None or self.given_blocks is not None:
                    raise
                _fitting[key] = self.fitting[kernel] = found

    def _query_blocks(self, kernel: str) -> int:
        """B · ⌈Lq / BM⌉"""
        found: int = self.batch * triton.cdiv(self.lq, self.blocks(kernel).queries)
        return found

    def _sizes(self, kernel: str, parts: int = 1) -> Sizes:
        call, most = self.call, self.lq + self.lk
        lowest, highest = call.lowest or 0, call.highest or 0
        if self.consecutive:  # 32-bit numbers are enough then
            lowest, highest = (max(-most, min(most, x)) for x in (lowest, highest))
        return Sizes(
            self.heads, self.heads // self.kv_heads, self.lq, self.lk, self.columns, call.first_offset, lowest, highest,
            parts, self._query_blocks(kernel), self.batch,
        )  # fmt: skip

    def _inputs(self) -> dict[str, Any]:
        """The arguments that all kernels share."""
        call = self.call
        tables = {name: None if name not in self.tables else _table(self.tables[name]) for name in TABLES}
        numbers: dict[str, Any] = {
            name: None if (x := getattr(call, name)) is None else _two_floats(x)
            for name in ("query_level", "key_level")
        }
        return {
            **{name: _rows(getattr(call, name)) for name in ("q", "k", "v", "raw_q", "raw_k")},
            **numbers,
            "temperature": None if call.temperature is None else call.temperature.float().contiguous(),
            **tables,
            "q_pos": None if self.consecutive else _positions(call.q_pos),
            "k_pos": None if self.consecutive else _positions(call.k_pos),
            "mask": None if call.mask is None else self._mask(call.mask),
            "seed": int(call.seed) if call.dropout else 0,
            "limit": min(int(call.dropout * 2**32), 2**32 - 1),
            "f": Factors(call.scale, call.softcap or 1.0, 1 / (1 - call.dropout)),
        }

    def _mask(self, mask: Tensor) -> Mask:
        mask = mask.expand(self.batch, self.heads, self.lq, self.lk).view(torch.uint8)
        return Mask(mask, *mask.stride())

    def forward(self, out: Tensor, lse: Tensor) -> None:
        """Writes the output, and the sums of each query."""
        self._fit("forward", lambda: self._forward(out, lse))

    def _forward(self, out: Tensor, lse: Tensor) -> None:
        form = self.form("forward")
        programs = self._programs(self._query_blocks("forward") * self.heads, form)
        sinks = None if self.call.sinks is None else self.call.sinks.float().contiguous()
        kernels.forward[(programs,)](
            **self._inputs(),
            sinks=sinks,
            scratch=self._scratch(programs, form),
            out=_rows(out),
            lse=lse,
            n=self._sizes("forward"),
            C=form,
            **self._options("forward", form),
        )

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, grads: dict[str, Tensor]) -> None:
        """Writes the gradients into `grads`, except empty ones."""
        delta = (grad.float() * out).sum(-1).contiguous()
        shared = {**self._inputs(), "grad": _rows(grad.to(self.call.q.dtype)), "delta": delta, "lse": lse.contiguous()}
        wanted = {name: x for name in TABLES if (x := grads[name]).numel()}
        self._fit("backward_queries", lambda: self._backward_queries(shared, grads, wanted), tuple(wanted))
        self._fit("backward_keys", lambda: self._backward_keys(shared, grads))
        if grads["sinks"].numel():
            assert self.call.sinks is not None
            # −Σ_i (weight of the sink) · g·out
            weight = torch.exp((self.call.sinks.float()[:, None] - lse[..., 0]) - lse[..., 1])
            grads["sinks"].copy_(-(weight * delta).sum((0, 2)))

    def _backward_queries(self, shared: dict[str, Any], grads: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        form = self.form("backward_queries")
        parts = self._parts(wanted, form)
        buffers = {
            name: x.new_zeros(parts, self.heads, *x.shape[1:], dtype=torch.float32) for name, x in wanted.items()
        }
        grad_flags: dict[str, Any] = {f"grad_{name}": True for name in wanted}
        form = form._replace(**grad_flags, scratch=form.scratch or bool(wanted))
        kernels.backward_queries[(parts * self.heads,)](
            **shared, dq=_rows(grads["q"]), draw_q=_rows(_given(grads["raw_q"])),
            dquery_level=_given(grads["query_level"]), dtemperature=_given(grads["temperature"]),
            **{f"d{name}": buffers.get(name) for name in TABLES}, scratch=self._scratch(parts * self.heads, form),
            n=self._sizes("backward_queries", parts), C=form, **self._options("backward_queries", form),
        )  # fmt: skip
        for name, x in wanted.items():
            total = buffers[name].sum(0)
            x.copy_(total if x.shape[0] == self.heads else total.sum(0, keepdim=True))

    def _parts(self, wanted: dict[str, Tensor], form: Form) -> int:
        """Into how many parts the blocks of queries of a head are divided. Memory for tables bounds the number."""
        items = self._query_blocks("backward_queries")
        most: int = triton.cdiv(PROGRAMS, self.heads)
        if not wanted:
            return min(items, most) if form.scratch else items
        one = 4 * self.heads * sum(x[0].numel() for x in wanted.values())
        return max(1, min(items, most, BUFFER_BYTES // one))

    def _backward_keys(self, shared: dict[str, Any], grads: dict[str, Tensor]) -> None:
        form = self.form("backward_keys")
        programs = self._programs(triton.cdiv(self.lk, form.block_n) * self.batch * self.kv_heads, form)
        kernels.backward_keys[(programs,)](
            **shared, dk=_rows(grads["k"]), dv=_rows(grads["v"]), draw_k=_rows(_given(grads["raw_k"])),
            dkey_level=_given(grads["key_level"]), scratch=self._scratch(programs, form),
            n=self._sizes("backward_keys"), C=form, **self._options("backward_keys", form),
        )  # fmt: skip

    def _programs(self, blocks: int, form: Form) -> int:
        """How many programs compute so many blocks. Those with scratch memory are few, and take several blocks each."""
        return min(blocks, PROGRAMS) if form.scratch else blocks

    def _scratch(self, programs: int, form: Form) -> Tensor | None:
        if not form.scratch:
            return None
        return self.call.q.new_empty(programs * form.block_m * form.band, dtype=torch.float32)

    def kept(self) -> Tensor:
        """The weights that stay under dropout, bool [B, H, Lq, Lk]."""
        found = self.call.q.new_empty(self.batch, self.heads, self.lq, self.lk, dtype=torch.uint8)
        block = 16
        programs = triton.cdiv(self.lq, block) * triton.cdiv(self.lk, block) * self.batch * self.heads
        inputs = self._inputs()
        kernels.kept_weights[(programs,)](found, inputs["seed"], inputs["limit"], self._sizes("forward"), BLOCK=block)
        return found.bool()

    def _options(self, kernel: str, form: Form) -> dict[str, int]:
        blocks = self.blocks(kernel)
        # The compiler may load an iteration ahead, which must not happen to scratch memory.
        return {"num_warps": blocks.warps, "num_stages": 1 if form.scratch else blocks.stages}


def tuned_launch(call: Call, run: Callable[[Launch], object], backward: bool) -> Launch:
    """A launch with the block sizes that take the least time to `run`; measured once for each kind of call."""
    launch = Launch(call)
    # The form names terms and widths; lengths matter by their order of magnitude.
    key = (
        launch.form("backward_queries" if backward else "forward"),
        backward,
        launch.lq.bit_length(),
        launch.lk.bit_length(),
        call.q.device,
    )

    def seconds(blocks: Blocks) -> float | None:
        try:
            found: float = triton.testing.do_bench(lambda: run(Launch(call, blocks)))
        except triton.runtime.errors.OutOfResources:
            return None
        return found

    return Launch(call, fastest(key, seconds))


def _padded(width: int) -> int:
    """The width of a block in a matrix product: a power of 2, at least 16."""
    found: int = max(16, triton.next_power_of_2(width))
    return found


def _rows(x: Tensor | None) -> Rows | None:
    if x is None:
        return None
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    return Rows(x, *x.stride()[:3])


def _table(x: Tensor) -> Table:
    return Table(x, x.stride(0) if x.shape[0] > 1 else 0)


def _positions(x: Tensor) -> Positions:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Positions(x, x.stride(0) if x.shape[0] > 1 else 0)


def _two_floats(x: Tensor) -> Tensor:
    """A tensor of float64 as two floats each: [..., 2]. An infinite number has a low part of 0."""
    high = x.float()
    low = torch.where(high.isfinite(), x - high.double(), 0.0).float()
    return torch.stack([high, low], dim=-1).contiguous()


def _given(x: Tensor) -> Tensor | None:
    return x if x.numel() else None
