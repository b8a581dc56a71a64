"""Pictures, a page, a trace and advice on a run, for people. Nothing here trains."""
