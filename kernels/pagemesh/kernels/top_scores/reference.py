"""``top_scores`` row by row, by sorting each row."""

from __future__ import annotations

import torch

from pagemesh.kernels.log_softmax import log_softmax


def top_scores(
    x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, top_counts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, width = len(rows), x.shape[1]
    scores = torch.empty(columns.shape, dtype=torch.float32)
    top_columns = torch.zeros((count, most), dtype=torch.int64)
    tops = torch.zeros((count, most))
    for index, row in enumerate(rows.tolist()):
        asked = columns[index]
        outside = bool(((asked < 0) | (asked >= width)).any())
        if not 0 <= row < len(x) or outside:
            raise IndexError(f"row {row} with columns {asked.tolist()} is not in {list(x.shape)}")
        own = log_softmax(x[row : row + 1])[0]
        scores[index] = own[asked]
        best = x[row].sort(descending=True, stable=True).indices
        if bool(x[row].isnan().any()):
            best = torch.arange(width)
        best = best[: int(top_counts[index])]
        top_columns[index, : len(best)] = best
        tops[index, : len(best)] = own[best]
    return scores, top_columns, tops
