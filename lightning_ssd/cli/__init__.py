"""The command line ``lightning-ssd``. The only package that imports typer and rich."""
