"""Lightning's own tests, public projects and other versions, with our strategies."""
