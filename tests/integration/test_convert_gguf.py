"""Conversion to GGUF by llama.cpp's converter: what arrives is checked, and what did not arrive is an error."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import toys

from dflash_train.assets import resolve
from dflash_train.config.load import CheckFailed
from dflash_train.drafter.model import Drafter
from dflash_train.drafter.spec import FULL, SLIDING, tensor_shapes
from dflash_train.export import CardFacts, write_export
from dflash_train.folder import load_drafter_folder
from dflash_train.target.info import read_target_info

pytest.importorskip("sentencepiece", reason="make rivals installs what the converter imports")
pytestmark = pytest.mark.slow
convert_gguf = toys.script("convert_gguf", "scripts")
TARGET = Path(resolve("embedded", "target"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A random drafter for the embedded target, with every setting another one than the default."""
    info = read_target_info(str(TARGET))
    spec = toys.toy_spec(
        hidden_size=info.hidden_size, vocab_size=info.vocab_size, num_target_layers=info.num_layers, mask_token_id=4090,
        max_position_embeddings=info.max_position_embeddings, head_dim=32, intermediate_size=96, sliding_window=24,
        layer_types=(SLIDING, FULL), output_multiplier=0.25, final_logit_softcapping=12.5, rope_theta=50000.0, selector_rank=32,
        input_embedding_scale=2.0,
    )  # fmt: skip

    return write_export(
        tmp_path_factory.mktemp("drafter") / "out",
        state=toys.randomise(Drafter(spec)).state_dict(),
        spec=spec,
        target=info,
        dtype=torch.float32,
        tokenizer_dir=None,
        card=CardFacts(name="toy", base_model="toy", license="mit"),
    )


@pytest.fixture(scope="module")
def converted(drafter, tmp_path_factory):
    """(the file, what was read of it, spec, tensors)."""
    output = tmp_path_factory.mktemp("gguf") / "drafter.gguf"
    (file,) = convert_gguf.convert_drafters({drafter: output}, TARGET, outtype="f32")
    return output, file, *load_drafter_folder(drafter)[:2]


def faults(converted, change):
    """What is found after `change` has been made to a copy of the file."""
    _, file, spec, tensors = converted
    file = copy.deepcopy(file)
    change(file)
    return convert_gguf.faults(file, spec, tensors, TARGET)


def test_everything_arrives(converted):
    output, file, spec, tensors = converted
    assert sorted(file.tensors) == sorted(map(convert_gguf.gguf_name, tensor_shapes(spec)))
    assert set(file.types.values()) == {"F32"}
    for name, tensor in tensors.items():
        assert np.array_equal(file.tensors[convert_gguf.gguf_name(name)], tensor.numpy()), name
    assert file.fields["dflash.attention.sliding_window_pattern"] == [True, False]
    assert file.fields["dflash.logit_scale"] == 0.25 and file.fields["dflash.final_logit_softcapping"] == 12.5
    assert len(file.fields["tokenizer.ggml.tokens"]) == spec.vocab_size
    assert faults(converted, lambda file: None) == []
    assert [p.name for p in output.parent.iterdir()] == ["drafter.gguf"]


def test_what_did_not_arrive_is_named(converted):
    def without(name):
        return lambda file: file.tensors.pop(name)

    def field(name, value):
        return lambda file: file.fields.update({name: value})

    def swap_taps(file):
        file.tensors["blk.1.ffn_conv_base"] = file.tensors["blk.1.ffn_conv_base"][:, ::-1]

    def transpose(file):
        file.tensors["fc.weight"] = file.tensors["fc.weight"].T

    def other_token(file):
        file.fields["tokenizer.ggml.tokens"][300] = "nonsense"

    for change, message in [
        (without("selector_successor.weight"), "selector_successor.weight is missing"),
        (lambda file: file.tensors.update({"output.weight": np.zeros(1)}), "output.weight belongs to no drafter"),
        (swap_taps, "blk.1.ffn_conv_base .F32. has other values"),
        (transpose, "fc.weight has the shape"),
        (field("dflash.attention.causal", None), "attention.causal = None, the drafter has False"),
        (field("dflash.attention.sliding_window", 23), "sliding_window = 23"),
        (field("dflash.attention.sliding_window_pattern", [True, True]), "sliding_window_pattern"),
        (field("dflash.target_layers", [1, 3]), "target_layers"),
        (field("dflash.rope.freq_base", 10000.0), "rope.freq_base"),
        (field("dflash.rope.dimension_count", 16), "rope.dimension_count = 16"),
        (field("dflash.embedding_scale", None), "embedding_scale = None"),
        (field("tokenizer.ggml.mask_token_id", 4080), "mask_token_id = 4080"),
        (field("tokenizer.ggml.tokens", None), "no tokenizer"),
        (field("tokenizer.ggml.merges", []), "no merges"),
        (other_token, "1 of its tokens are not the target's, the first is 300"),
    ]:
        found = faults(converted, change)
        assert len(found) == 1 or message.startswith("target_layers"), found
        assert any(re.search(message, text) for text in found), (message, found)


def test_a_file_without_tensors_or_of_another_target_is_refused(converted, drafter, tmp_path, monkeypatch):
    found = faults(converted, lambda file: file.tensors.clear())
    assert len(found) == len(converted[3]) and all("is missing" in text for text in found)
    other = tmp_path / "target"
    other.mkdir()
    for file in TARGET.iterdir():
        (other / file.name).symlink_to(file)
    (other / "tokenizer.json").unlink()
    vocabulary = json.loads((TARGET / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    a, b = list(ids)[260:262]
    ids[a], ids[b] = ids[b], ids[a]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "2 of its tokens are not the target's" in convert_gguf.tokenizer_faults(converted[1], other)[0]

    # A converter that writes something else leaves no file behind.
    monkeypatch.setattr(convert_gguf, "convert", lambda outputs, **_: [p.write_bytes(b"x") for p in outputs.values()])
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        convert_gguf.convert_drafters({drafter: tmp_path / "out" / "x.gguf"}, TARGET, outtype="f32")
    monkeypatch.setattr(
        convert_gguf, "convert", lambda outputs, **_: [p.write_bytes(whole[:-40000]) for p in outputs.values()]
    )
    whole = converted[0].read_bytes()
    with pytest.raises((CheckFailed, ValueError)):
        convert_gguf.convert_drafters({drafter: tmp_path / "out" / "x.gguf"}, TARGET, outtype="f32")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command(drafter, tmp_path):
    output, target = tmp_path / "d.gguf", tmp_path / "t.gguf"
    done = toys.call(
        convert_gguf.main,
        drafter,
        "--target",
        "embedded",
        "--output",
        output,
        "--outtype",
        "q8_0",
        "--with-target",
        target,
    )
    assert done.code == 0, done.err
    assert "36 tensors (22 Q8_0, 14 F32), 4096 tokens" in done.out and "68 tensors" in done.out
    assert toys.call(convert_gguf.main, drafter, "--target", "embedded").code == 2
    config = drafter / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace("DFlash2DraftModel", "Qwen3ForCausalLM"))
    refused = toys.call(convert_gguf.main, drafter, "--target", "embedded", "--output", tmp_path / "x.gguf")
    config.write_text(kept)
    assert refused.code == 2 and "llama.cpp could not use it" in refused.err and not (tmp_path / "x.gguf").exists()
