"""`python -m trainer`, and what `deepspeed --module trainer` starts."""

from trainer.cli import main

main()
