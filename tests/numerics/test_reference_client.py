"""An exported drafter in the reference implementation: same tensors, same numbers, same rounds."""

from __future__ import annotations

import time

import pytest
import torch
import toys

from dflash_train.card import CardFacts
from dflash_train.drafter.decode import DraftSession
from dflash_train.export import write_export
from dflash_train.generation.single import GREEDY, _propose, plain_decode, speculative_decode
from dflash_train.walk import accepted_at_anchors, walk_rounds

reference = pytest.importorskip("dflash.model")


@pytest.fixture(scope="module")
def client(overfitted):
    model, info = reference.DFlash2DraftModel.from_pretrained(overfitted.export, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    return model.eval()


def generate(monkeypatch, client, prompt: list[int], budget: int, stop: list[int] | None):
    """(answer, tokens per round) by the reference loop."""
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    out = reference.dflash_generate(client, toys.toy_model(), torch.tensor([prompt]), budget, stop, return_stats=True)
    return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths


def walk(step, prompt: list[int], answer: list[int], reason: str) -> list[int]:
    example = toys.example_of({"prompt_ids": prompt, "response_ids": answer, "finish_reason": reason})
    anchors, path, _ = accepted_at_anchors(step, example)
    return walk_rounds(anchors, path)


@pytest.mark.parametrize("slots", [8, 3])
@torch.inference_mode()
def test_hidden_states_and_proposals_are_ours(overfitted, client, slots):
    step, target = overfitted.step, toys.toy_model()
    for row in overfitted.rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
        features = reference.extract_context_feature(states, client.target_layer_ids)
        for anchor in (6, 7, 13, 25):
            block = torch.tensor([[int(ids[0, anchor])] + [client.mask_token_id] * (slots - 1)])
            theirs = client(
                position_ids=torch.arange(anchor + slots)[None],
                target_hidden=features[:, :anchor],
                noise_embedding=torch.nn.functional.embedding(block, target.get_input_embeddings().weight),
            )
            session = DraftSession(step.drafter)
            session.extend(features[:, :anchor])
            torch.testing.assert_close(session.hidden(step.embed(block)), theirs, rtol=1e-4, atol=1e-4)
            drafted, _, _ = client.propose(theirs[:, 1:], block[:, 0], target.lm_head, 0.0)
            draft = _propose(step, session, int(block[0, 0]), slots, GREEDY, torch.zeros(1, slots))
            assert draft.token_ids_NS.tolist() == drafted.tolist()


@pytest.mark.parametrize("budget", [2, 9, 28])
def test_the_reference_loop_gives_the_greedy_answer_in_the_rounds_of_our_walk(monkeypatch, overfitted, client, budget):
    for row in overfitted.rows:
        answer, rounds = generate(monkeypatch, client, row["prompt_ids"], budget, None)
        assert answer == row["response_ids"][:budget]
        assert rounds == walk(overfitted.step, row["prompt_ids"], answer, "length")
        assert rounds == speculative_decode(overfitted.step, row["prompt_ids"], budget, set()).rounds
    assert budget < 28 or len(rounds) < 10


def test_the_reference_loop_stops_in_the_rounds_of_our_walk(monkeypatch, overfitted, client):
    tried = 0
    for row in overfitted.rows:
        text = row["response_ids"]
        for at in [i for i in range(5, len(text)) if text[i] not in text[:i]][:3]:
            answer, rounds = generate(monkeypatch, client, row["prompt_ids"], 200, [text[at]])
            assert answer == text[: at + 1]
            assert rounds == walk(overfitted.step, row["prompt_ids"], answer, "stop")
            tried += 1
    assert tried >= 3


def test_prompts_it_was_not_trained_on_are_decoded_alike(monkeypatch, overfitted, client):
    for prompt in toys.prompts(3, seed=9):
        plain = plain_decode(overfitted.step.target, prompt, 24, set())
        answer, rounds = generate(monkeypatch, client, prompt, 24, None)
        assert answer == plain.token_ids
        assert rounds == walk(overfitted.step, prompt, answer, "length")


def test_a_generated_token_equal_to_the_mask_token_is_kept(monkeypatch, tmp_path):
    prompt = toys.prompts(1, seed=4)[0]
    text = toys.greedy(toys.toy_model(), prompt, 24)
    mask = text[6]  # the target says the mask token
    step = toys.toy_step(toys.toy_target(), mask_token_id=mask)
    ours = speculative_decode(step, prompt, 24, set())
    assert ours.token_ids == text
    card = CardFacts(name="toy", base_model="toy", license="mit")
    folder = write_export(
        tmp_path / "out",
        state=step.drafter.state_dict(),
        spec=step.drafter.spec,
        target=toys.toy_info(),
        dtype=torch.float32,
        tokenizer_dir=None,
        card=card,
    )
    client = reference.DFlash2DraftModel.from_pretrained(folder, dtype="auto").eval()
    answer, rounds = generate(monkeypatch, client, prompt, 24, None)
    assert mask in answer
    assert answer == text
    assert rounds == ours.rounds == walk(step, prompt, text, "length")
