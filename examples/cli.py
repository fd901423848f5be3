r"""The quickstart's model through LightningCLI: the callbacks come from a YAML file.

    python examples/cli.py fit --config examples/configs/all.yaml

`configs/` has a file for each callback, with what its options mean, and one for all together. Any
option can be changed on the command line; `python examples/cli.py fit --help` lists them all:

    python examples/cli.py fit --config examples/configs/gradient_checkpointing.yaml \
        --trainer.max_epochs=1 --data.batch_size=64
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from quickstart import DigitsData, DigitsModel


def main(args: list[str] | None = None) -> LightningCLI:
    return LightningCLI(
        DigitsModel,
        DigitsData,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        args=args,
    )


if __name__ == "__main__":
    main()
