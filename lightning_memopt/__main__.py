"""The command `lightning-memopt`."""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console

from lightning_memopt import __version__
from lightning_memopt.commands import doctor, estimate, report
from lightning_memopt.commands._errors import CommandError

# Its name is that of its file, its help the first line of that.
_COMMANDS = (estimate, report, doctor)
_INTERRUPTED = 130  # as a shell says that Ctrl-C ended a command


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name, and return the exit status.

    Args:
        argv: The arguments; those of the process by default.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-memopt", description="What a Lightning training needs of memory."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in _COMMANDS:
        about = (module.__doc__ or "").partition("\n")[0]
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=about, description=about)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args, Console())
        sys.stdout.flush()
    except CommandError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
