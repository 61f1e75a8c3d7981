"""What fewer bits would cost a drafter: torchao rounds its matrices, and real decoding is measured again, format by format.

python scripts/measure_rounding.py RUN_OR_EXPORT [-c RECIPE] [key=value ...]

Engines that quantise a drafter themselves (MLX, ollama, Splash) round in their own ways; this says what to expect. Norms, convolution taps and
codebooks stay in bf16, as there. Needs torchao.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dflash_train.acceptance import Tau, pooled
from dflash_train.build import SOURCE_HELP, open_source
from dflash_train.config.load import parse, parser, run_command
from dflash_train.config.values import require_packages
from dflash_train.evaluate import decode_prompts


def formats() -> dict[str, Any]:
    """name -> torchao's configuration."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return {
        "int8, one scale per row": Int8WeightOnlyConfig(),
        "float8 e4m3, one scale per row": Float8WeightOnlyConfig(),
        "int4, groups of 32": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int3, groups of 32": IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerGroup(32)),
    }


def rounded(drafter: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    """The drafter's tensors after its matrices went through a format and back."""
    from torchao.quantization import quantize_

    state = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            once = copy.deepcopy(module).to(torch.bfloat16)
            quantize_(once, config)
            state[f"{name}.weight"] = once.weight.dequantize().to(module.weight.dtype)
    return state


def main(argv: list[str]) -> None:
    commands = parser("python scripts/measure_rounding.py", __doc__.splitlines()[0], source=SOURCE_HELP)
    args = parse(commands, argv)
    require_packages("rounding", ["torchao"], "pip install torchao")
    run = open_source(args.source, args.config, args.overrides)
    drafter, prompts = run.step.drafter, run.heldout_prompts()
    drafter.load_state_dict({name: t.to(torch.bfloat16).to(t.dtype) for name, t in drafter.state_dict().items()})
    exported = {name: t.clone() for name, t in drafter.state_dict().items()}

    def tau() -> Tau:
        return pooled(decode_prompts(run.step, prompts, run.recipe.evaluate, run.stop_ids, plain=False).results)

    base = tau()
    print("| weights | tau | tokens / rounds | change |\n|---|---:|---:|---:|")
    print(f"| bfloat16 | {base.value:.3f} | {base.tokens} / {base.rounds} | |", flush=True)
    for name, config in formats().items():
        drafter.load_state_dict(exported)
        drafter.load_state_dict(rounded(drafter, config))
        found = tau()
        print(
            f"| {name} | {found.value:.3f} | {found.tokens} / {found.rounds} | {found.value / base.value - 1:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
