"""What the weights are like, without the N×N matrix: rows, columns, and chosen rows (docs/statistics.md)."""

from relampago.problem import RowStatistics
from relampago.statistics.chosen import top_keys, weights
from relampago.statistics.columns import column_sums
from relampago.statistics.rows import merge, rows

__all__ = ["RowStatistics", "column_sums", "merge", "rows", "top_keys", "weights"]
