"""The console script `millstream-loader`, which `python -m dataloader_svc` is too."""

from shared.interrupt import told


def main() -> None:
    """Run `cli.main`, which imports everything else."""
    told("millstream-loader", "dataloader_svc.cli")


if __name__ == "__main__":
    main()
