"""Lightning's strategies and Fabric's: the only package that leans on Lightning."""
