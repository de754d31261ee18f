"""The console script `millstream-trainer`, which `python -m trainer` is too; `deepspeed --module trainer` starts it."""

from shared.interrupt import told


def main() -> None:
    """Run `cli.main`; it imports everything else."""
    told("millstream-trainer", _run)


def _run() -> None:
    from trainer.cli import main

    main()


if __name__ == "__main__":
    main()
