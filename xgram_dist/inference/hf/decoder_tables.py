"""Tables at inference: stored rows, and the vectors of tokens. Needs torch alone: an exported folder holds a copy.

The tables of one view stand side by side, as the columns of one tensor: a token reads the same rows in all of them, so
one gather serves every layer and site. Gates are multiplied into the rows. Rows are stored as fp32 or bf16, or as codes
of fewer bits that end with the row's scales; they become fp32 as they are gathered.
Shapes: S rows, W columns of a view, U distinct tokens or other keys, N accesses, G groups of columns with a scale.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROW_FORMATS = ("fp32", "bf16", "fp8", "int8", "int4")
INT4_GROUP = 32
"""Columns that share a scale in int4. In fp8 and int8 they are those of one table."""
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""The largest code of a quantised format."""
SCALE_BYTES = 2


@dataclass(frozen=True)
class RowFormat:
    """How a row of fp32 values is stored. A quantised row has the codes of its columns, then a bf16 scale a group."""

    name: str
    widths: tuple[int, ...]
    """Of the tables that stand side by side."""

    @property
    def quantised(self) -> bool:
        return self.name in LARGEST

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.quantised else {"fp32": torch.float32, "bf16": torch.bfloat16}[self.name]

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def groups(self) -> list[int]:
        """Sizes of the groups of columns that share a scale."""
        if self.name != "int4":
            return list(self.widths)
        return [min(INT4_GROUP, width - start) for width in self.widths for start in range(0, width, INT4_GROUP)]

    @property
    def code_bytes(self) -> int:
        return (self.width + 1) // 2 if self.name == "int4" else self.width

    @property
    def stored_width(self) -> int:
        """Elements of a stored row."""
        return self.code_bytes + SCALE_BYTES * len(self.groups) if self.quantised else self.width

    @property
    def nbytes(self) -> int:
        """Of a stored row."""
        return self.stored_width * self.dtype.itemsize

    def encode(self, rows_SW: Tensor) -> Tensor:
        """fp32 rows as they are stored."""
        if not self.quantised:
            return rows_SW.to(self.dtype)
        largest_SG = torch.stack([group.abs().amax(1) for group in rows_SW.split(self.groups, 1)], 1)
        # Rounded up to bf16, so that no code exceeds the largest.
        scales_SG = (largest_SG / LARGEST[self.name] * (1 + 2**-8)).clamp_min(1e-30).bfloat16()
        x = rows_SW / self._of_columns(scales_SG.float())
        if self.name == "fp8":
            codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
        elif self.name == "int8":
            codes = x.round().to(torch.int8).view(torch.uint8)
        else:
            # The first half of the columns in the low four bits, the second half in the high ones.
            first, second = F.pad(x.round() + 8, (0, self.width % 2)).to(torch.uint8).chunk(2, 1)
            codes = first | (second << 4)
        return torch.cat((codes, scales_SG.view(torch.uint8)), 1)

    def decode(self, stored: Tensor) -> Tensor:
        """Stored rows as fp32."""
        if not self.quantised:
            return stored.float()
        codes, scales = stored[:, : self.code_bytes], stored[:, self.code_bytes :].contiguous().view(torch.bfloat16)
        if self.name == "fp8":
            x = codes.view(torch.float8_e4m3fn).float()
        elif self.name == "int8":
            x = codes.view(torch.int8).float()
        else:
            x = torch.cat((codes & 15, codes >> 4), 1)[:, : self.width].float() - 8
        return x * self._of_columns(scales.float())

    def _of_columns(self, scales_SG: Tensor) -> Tensor:
        sizes = torch.tensor(self.groups, device=scales_SG.device)
        return scales_SG.repeat_interleave(sizes, 1, output_size=self.width)


class ViewRows(nn.Module):
    """The rows of one view's tables."""

    def __init__(self, num_rows: int, row_format: RowFormat):
        super().__init__()
        self.row_format = row_format
        stored = torch.zeros(num_rows, row_format.stored_width, dtype=row_format.dtype)
        if row_format.quantised:
            self.register_buffer("rows", stored)
        else:
            self.rows = nn.Parameter(stored)

    def forward(self, index_N: Tensor, starts_U: Tensor | None, coefficients_N: Tensor | None) -> Tensor:
        """One vector for each token, in fp32 [U, W]."""
        if starts_U is None or coefficients_N is None:
            return self.row_format.decode(F.embedding(index_N, self.rows))
        if self.rows.dtype == torch.float32:
            return combined(self.rows, index_N, starts_U, coefficients_N.float())
        rows_NW = self.row_format.decode(F.embedding(index_N, self.rows))
        order = torch.arange(len(index_N), device=index_N.device)
        return combined(rows_NW, order, starts_U, coefficients_N.float())


class Route(nn.Module):
    """Which rows a token reads: rows[offsets[t]:offsets[t + 1]], with their coefficients."""

    offsets: Tensor
    rows: Tensor
    coefficients: Tensor

    def __init__(self, vocabulary: int, accesses: int):
        super().__init__()
        self.register_buffer("offsets", torch.zeros(vocabulary + 1, dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(accesses, dtype=torch.int64))
        self.register_buffer("coefficients", torch.zeros(accesses))

    def forward(self, tokens_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index_N, starts_U = accesses_of(tokens_U, self.offsets)
        return self.rows[index_N], starts_U, self.coefficients[index_N]


class Tables(nn.Module):
    """All tables of a model, and which rows a token reads. Without routing a token, or another key, reads its own."""

    def __init__(self, tables: list[dict[str, Any]], accesses: list[int], vocabulary: int, row_format: str):
        """`tables`: name, rows, width and view of each, views ascending. `accesses`: of each view, where rows are
        shared by hashing."""
        super().__init__()
        self.tables = tables
        self.routes = nn.ModuleList(Route(vocabulary, count) for count in accesses)
        self.views = nn.ModuleList()
        for view in sorted({table["view"] for table in tables}):
            members = [table for table in tables if table["view"] == view]
            stored = RowFormat(row_format, tuple(table["width"] for table in members))
            self.views.append(ViewRows(members[0]["rows"], stored))

    @property
    def width(self) -> int:
        """Columns of all views."""
        return sum(table["width"] for table in self.tables)

    def forward(self, keys_U: Tensor) -> Tensor:
        """The vectors of distinct keys, those of all tables side by side [U, sum of W]."""
        parts = self._parts(keys_U)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def read_into(self, keys_U: Tensor, vectors_UW: Tensor) -> None:
        """As `forward`, into memory that exists, on any device."""
        parts = self._parts(keys_U)
        for part, target in zip(parts, vectors_UW.split([part.shape[1] for part in parts], 1), strict=True):
            target.copy_(part)

    def rows_of(self, keys_U: Tensor) -> list[Tensor]:
        """The rows of each view that these keys read."""
        return [self.routes[number](keys_U)[0] if len(self.routes) else keys_U for number in range(len(self.views))]

    def _parts(self, keys_U: Tensor) -> list[Tensor]:
        """The vectors of each view."""
        return [
            view(*self.routes[number](keys_U)) if len(self.routes) else view(keys_U, None, None)
            for number, view in enumerate(self.views)
        ]

    def by_name(self, vectors_UW: Tensor) -> dict[str, Tensor]:
        """The columns of each table."""
        columns = vectors_UW.split([table["width"] for table in self.tables], 1)
        return {table["name"]: column for table, column in zip(self.tables, columns, strict=True)}


def accesses_of(tokens_U: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [N] of the tokens' access lists in a routing's arrays, and where each token's list begins [U]."""
    first, counts = offsets[tokens_U], offsets[tokens_U + 1] - offsets[tokens_U]
    starts = counts.cumsum(0) - counts
    order = torch.arange(int(counts.sum()), device=tokens_U.device)
    return order + (first - starts).repeat_interleave(counts), starts


def combined(rows_RW: Tensor, index_N: Tensor, starts_U: Tensor, weights_N: Tensor) -> Tensor:
    """One vector for each token [U, W]: the weighted sum of the rows it reads."""
    return F.embedding_bag(index_N, rows_RW, starts_U, mode="sum", per_sample_weights=weights_N)
