"""An OpenAI-compatible server around `generation.slots`, for trying a drafter; `dflash_train.serve` is its command."""
