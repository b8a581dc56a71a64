"""Places where the bytes of storages wait (SSD, host memory), and the transfers between them and devices."""
