"""The commands of `lightning-memopt`: one file each, with `add_arguments` and `run`."""
