"""When it is done: one Lightning callback a file, each thin over `lightning_memopt.core`."""
