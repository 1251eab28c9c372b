"""Any fsspec file system: ``fsspec+PROTOCOL://``."""
