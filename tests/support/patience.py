"""How long tests wait for what has to come: a hang is a red test, and a machine that is ten times as busy is none."""

PATIENCE_S = 300.0
"""For a thread, an event or a child process. Less than the limit of a test (pyproject.toml), which cannot say why."""
