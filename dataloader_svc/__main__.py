"""The console script `millstream-loader`, which `python -m dataloader_svc` is too."""

from shared.interrupt import told


def main() -> None:
    """Run `cli.main`; it imports everything else."""
    told("millstream-loader", _run)


def _run() -> None:
    from dataloader_svc.cli import main

    main()


if __name__ == "__main__":
    main()
