"""From a drafter to traffic: python scripts/rollout.py DRAFTER --target TARGET --plain URL --speculative URL (docs/rollout.md)."""

from dflash_train.config.load import run_command
from dflash_train.rollout.command import main

if __name__ == "__main__":
    run_command(main)
