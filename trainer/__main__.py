"""The console script `millstream-trainer`, which `python -m trainer` is too; `deepspeed --module trainer` starts it."""

from shared.interrupt import told


def main() -> None:
    """Run `cli.main`, which imports everything else."""
    told("millstream-trainer", "trainer.cli")


if __name__ == "__main__":
    main()
