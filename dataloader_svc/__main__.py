"""`python -m dataloader_svc` is `millstream-loader`."""

from dataloader_svc.cli import main

if __name__ == "__main__":
    main()
