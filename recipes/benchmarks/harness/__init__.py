"""What the benchmarks share: shapes, modes, rounds, tables, drives and limits."""
