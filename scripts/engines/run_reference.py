"""Worker: z-lab's `dflash` client on transformers. Reads a job, writes what it proposed (see engine_roundtrip.py)."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    import dflash.model as client
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    proposed: list[list[int]] = []
    propose = client.DFlash2DraftModel.propose

    def recorded(self, *args, **named):
        found = propose(self, *args, **named)
        proposed.append(found[0][0].tolist())
        return found

    client.DFlash2DraftModel.propose = recorded
    drafters = {}
    for name, folder in job["drafters"].items():
        drafter, info = client.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        left = {kind: sorted(map(str, names)) for kind, names in info.items() if names and kind.endswith("_keys")}
        answers, drafts = [], []
        for prompt in job["prompts"]:
            proposed.clear()
            ids = torch.tensor([prompt["ids"]])
            whole = drafter.eval().spec_generate(target, ids, prompt["max_new_tokens"], [])[0].tolist()
            answers.append(whole[len(prompt["ids"]) :])
            drafts.append(list(proposed))
        drafters[name] = {"loaded": not left, "load_report": left, "answers": answers, "drafts": drafts}
    versions = f"dflash {version('dflash')}, transformers {version('transformers')}, torch {version('torch')}"
    Path(result_file).write_text(json.dumps({"engine": versions, "drafters": drafters}))


if __name__ == "__main__":
    main(*sys.argv[1:])
