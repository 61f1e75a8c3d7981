"""A drafter started from a released folder computes, at step 0, what z-lab's reference computes from that folder."""

from __future__ import annotations

import json

import pytest
import released_drafters
import torch
import toys

from dflash_train.build import build_step, outline
from dflash_train.config.load import load_recipe
from dflash_train.drafter.decode import DraftSession
from dflash_train.drafter.spec import FULL, SLIDING
from dflash_train.generation.single import GREEDY, _propose

reference = pytest.importorskip("dflash.model")
V1 = {"two": False}
WINDOW = {"layer_types": [SLIDING, SLIDING], "sliding_window": 12, "use_sliding_window": True}
# name -> (the released folder, knobs of the recipe)
CASES = {
    "v2": ({}, []),
    "v2, window": ({**WINDOW, "is_causal": False}, []),
    "v2, mixed layers": ({**WINDOW, "layer_types": [SLIDING, FULL], "is_causal": False}, []),
    "v2, causal": ({"is_causal": True}, []),
    "v2, own heads, theta, eps and transforms": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 500.0, "rms_norm_eps": 1e-3, "intermediate_size": 80,
         "block": {"output_multiplier": 0.7, "final_logit_softcapping": 6.0, "input_embedding_scale": 3.0}},
        [],
    ),
    "v2, smaller block": ({}, ["drafter.block_size=5"]),
    "v2, larger block": ({}, ["drafter.block_size=10"]),
    "v2, more layers": ({}, ["drafter.num_hidden_layers=4"]),
    "v2, more layers of the other kind": ({}, ["drafter.num_hidden_layers=3", "drafter.sliding_window=16",
                                               f"drafter.layer_types=[{FULL},{FULL},{SLIDING}]"]),
    "v1 as v1": (V1, ["drafter.conv_kernel_size=0", "drafter.selector_rank=0"]),
    "v1 -> v2": (V1, []),
    "v1 -> v2, other sizes": (V1, ["drafter.conv_kernel_size=3", "drafter.conv_group_size=8", "drafter.selector_rank=4", "drafter.selector_top_k=4"]),
    "v1 -> v2, windows without is_causal": ({**V1, **WINDOW}, []),
    "v1 -> v2 with one more layer": ({**V1, **WINDOW, "is_causal": False}, ["drafter.num_hidden_layers=3"]),
}  # fmt: skip


def start(folder, target_dir, *knobs):
    """(step, outline) of a recipe that starts there."""
    # the head is checked against the target's own logits elsewhere; these transforms are the drafter's
    made = [f"target.path={target_dir}", f"drafter.init_from={folder}", "train.seed=3", *knobs]
    o = outline(load_recipe(None, made))
    return build_step(o, torch.device("cpu")), o


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_hidden_states_and_proposals_of_step_0_are_the_released_drafters(tmp_path, target_dir, monkeypatch, case):
    monkeypatch.setattr("dflash_train.target.hf.HFTarget.check_head", lambda *args: None)
    settings, knobs = CASES[case]
    client = released_drafters.reference_drafter(**settings)
    folder = released_drafters.save(tmp_path / "released", client, **settings)
    step, o = start(folder, target_dir, *knobs)
    target, slots = toys.toy_model(), o.spec.block_size
    ids = torch.tensor([toys.prompts(1, length=40, seed=2)[0]])
    features = reference.extract_context_feature(target(input_ids=ids, output_hidden_states=True).hidden_states, [1, 3])
    scale = o.spec.input_embedding_scale
    for anchor in (1, 7, 13, 29):
        block = torch.tensor([[int(ids[0, anchor])] + [toys.MASK] * (slots - 1)])
        theirs = client(
            position_ids=torch.arange(anchor + slots)[None],
            target_hidden=features[:, :anchor],
            noise_embedding=torch.nn.functional.embedding(block, target.get_input_embeddings().weight) * scale,
        )
        session = DraftSession(step.drafter)
        session.extend(features[:, :anchor])
        torch.testing.assert_close(session.hidden(step.embed(block)), theirs, rtol=1e-4, atol=1e-4)
        if isinstance(client, reference.DFlash2DraftModel):
            drafted, _, _ = client.propose(theirs[:, 1:], block[:, 0], target.lm_head, 0.0)
        else:
            drafted = client.compute_logits(theirs[:, 1:], target.lm_head).argmax(-1)
        draft = _propose(step, session, int(block[0, 0]), slots, GREEDY, torch.zeros(1, slots))
        assert draft.token_ids_NS.tolist() == drafted.tolist()


def test_what_is_new_learns_from_the_first_step_on(tmp_path, target_dir):
    """Zero where it must be silent, and yet with a gradient, or it would stay so."""
    folder = released_drafters.save(tmp_path / "released", released_drafters.reference_drafter(**V1), **V1)
    step, o = start(folder, target_dir, "drafter.num_hidden_layers=3")
    documents = [toys.document(40, slice(9, None), seed=1)]
    batch = toys.batch_of([documents], [[9, 12, 20]], block_size=o.spec.block_size)
    step(batch, step.target.read(batch), toys.weight_of(batch)).loss.backward()
    new = [
        n for n, _ in step.drafter.named_parameters() if "conv" in n or "successor" in n or n.startswith("layers.2.")
    ]
    assert {n for n, p in step.drafter.named_parameters() if n in new and p.grad.abs().max() == 0} <= {
        # behind a zero: they move once the successors and the new layer's outputs have
        n for n in new if n.startswith("layers.2.") and "o_proj" not in n and "down_proj" not in n
    }  # fmt: skip
    for name in (
        "layers.2.self_attn.o_proj.weight",
        "layers.2.mlp.down_proj.weight",
        "candidate_selector.successor_codebook",
    ):
        assert dict(step.drafter.named_parameters())[name].grad.abs().max() > 0, name


def test_a_mixed_v1_drafter_without_is_causal_is_refused_unless_the_recipe_says_which(tmp_path, target_dir):
    """4 sliding layers and a full one, no is_causal: z-lab's drafters of Qwen3.6 are like this."""
    settings = {**V1, **WINDOW, "layer_types": [SLIDING, FULL]}
    folder = released_drafters.save(tmp_path / "released", released_drafters.reference_drafter(**settings), **settings)
    with pytest.raises(ValueError, match=r"set drafter.is_causal; it is absent, .*one key cannot say"):
        start(folder, target_dir)
    _, o = start(folder, target_dir, "drafter.is_causal=false")
    assert o.spec.is_causal is False and o.spec.layer_types == (SLIDING, FULL)
    assert any("step 0 is close to it, not equal" in note for note in o.start.notes)


def test_the_reference_reads_what_was_saved(tmp_path):
    """The fixture is a real folder: the reference's own class loads it with nothing missing."""
    folder = released_drafters.save(tmp_path / "released", released_drafters.reference_drafter())
    _, info = reference.DFlash2DraftModel.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
