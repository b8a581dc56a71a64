"""Pictures, a page and advice on a run, for people. Nothing here trains."""
