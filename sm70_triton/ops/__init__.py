"""One file per operation; `registry.discover()` imports every module here whose name does not start with an underscore."""
