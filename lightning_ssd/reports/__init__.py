"""What a person looks at after a run, or during it: pictures, a page, a trace, advice. Nothing here trains."""
